"""Draws the curves of a search: the score against each parameter, with all others at their
start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from harness.config.catalogue import plain
from harness.reports.pictures import figures
from harness.tuning.findings import Curve

LINE, CHOSEN = "#2a6fbb", "#c8442b"
ACROSS = 4  # most panels in a row


def draw(curves: Mapping[str, Curve], full: float | None, path: Path, title: str) -> tuple[Path, ...]:
    """Draw a panel per parameter: a PNG at `path` and a PDF next to it."""
    across = min(ACROSS, len(curves))
    down = -(-len(curves) // across)
    size = (max(5.0, 0.6 + 3.1 * across), 0.9 + 2.6 * down)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.06))
    panels = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes, (name, curve) in zip(panels.flat, curves.items(), strict=False):
        _panel(axes, name, curve, full)
    for axes in list(panels.flat)[len(curves) :]:
        axes.set_visible(False)
    for row in panels:
        row[0].set_ylabel("score (0-100), 95 % interval")
    wide = 4 if across > 1 else 2
    figure.legend(handles=_legend(full), loc="outside lower center", ncols=wide, frameon=False, fontsize=8.5)
    figures.title(figure, title)
    return figures.save(figure, path)


def _panel(axes: Axes, name: str, curve: Curve, full: float | None) -> None:
    """Draw one curve. Values are spaced evenly, because a grid is seldom even; values that are
    words are not joined by a line."""
    values, rows = list(curve.rows), list(curve.rows.values())
    means = [100 * row.mean for row in rows]
    ends = [row.interval for row in rows]
    axes.vlines(range(len(rows)), [100 * end.low for end in ends], [100 * end.high for end in ends],
                color=LINE, linewidth=2.2, alpha=0.3)  # fmt: skip
    line = "" if any(isinstance(value, str | bool) for value in values) else "-"
    axes.plot(range(len(rows)), means, color=LINE, marker="o", markersize=5, linewidth=1.3, linestyle=line)
    for value, mark in ((curve.start, _START), (curve.chosen, _CHOSEN)):
        if value in curve.rows:
            place = values.index(value)
            axes.plot([place], [means[place]], **mark)
    if full is not None:
        axes.axhline(100 * full, color=figures.INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xticks(range(len(values)), [_short(value) for value in values])
    axes.set(xlabel=f"{name} (n = {_span([row.n for row in rows])})", ylim=(-3, 103), xlim=(-0.5, len(rows) - 0.5))
    figures.framed(axes, "y")


_START: dict[str, Any] = {"marker": "o", "markersize": 10, "markerfacecolor": "none", "color": figures.INK, "zorder": 4}
_CHOSEN: dict[str, Any] = {"marker": "*", "markersize": 12, "color": CHOSEN, "zorder": 5}


def _legend(full: float | None) -> list[Line2D]:
    dashed = {"color": figures.INK, "linewidth": 0.8, "linestyle": (0, (4, 3))}
    handles = [
        Line2D([], [], color=LINE, marker="o", markersize=5, linewidth=1.3, label="one parameter changed"),
        Line2D([], [], **_START, linestyle="", label="start"),
        Line2D([], [], **_CHOSEN, linestyle="", label="value chosen (with the others')"),
    ]
    return handles if full is None else [*handles, Line2D([], [], **dashed, label="full")]  # type: ignore[arg-type]


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else plain(value)


def _span(counts: Sequence[int]) -> str:
    return "-".join(map(str, dict.fromkeys((min(counts), max(counts)))))
