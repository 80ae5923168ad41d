"""Score against cost: what each method reads, moves and waits, a line per method over its budgets."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from harness.reports import costs
from harness.reports.costs import COLOURS, PANELS, Panel, SummaryRow
from harness.reports.pictures import figures
from harness.results.compared import FULL

MARKS = "osD^vPXp<>h"  # 11: with 12 colours no pair comes back before 132 lines
SHARES = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
CROWDED = 6  # from so many lines on, intervals cover more than they say
NAME_WIDTH = 30  # characters of a line in the legend


def has_frontier(rows: Sequence[SummaryRow]) -> bool:
    """Return whether a method other than Full has a score and a cost."""
    return any(panel.shows(rows) for panel in PANELS)


def frontier(rows: Sequence[SummaryRow], path: Path, title: str = "") -> tuple[Path, Path]:
    """Full is dashed, the Pareto front of complete rows dotted. Up to six lines have intervals. The files drawn."""
    others = _others(rows)
    panels = [panel for panel in PANELS if panel.shows(rows)]
    if not panels:
        raise ValueError("nothing to draw: no row has a score with a cost beside it")
    labels = sorted({row["label"] for row in others})
    legend = _legend(rows, labels)
    figure = Figure(figsize=_size(len(panels), legend), layout=ConstrainedLayoutEngine(wspace=0.06))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
        for label, points in panel.points(rows).items():
            if label in labels:
                _line(axes, points, _style(labels.index(label)), intervals=len(labels) <= CROWDED)
        _full(axes, panel, rows)
        _front(axes, panel, rows)
        _finish(axes, panel, rows)
    first = figure.axes[0]
    crowded = len(labels) > CROWDED
    first.set_ylabel("score (0-100)" if crowded else "score (0-100), 95 % interval")
    first.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.4g}"))
    low, high = first.get_ylim()
    first.set_ylim(max(-0.03, low), min(1.03, high))
    figure.legend(handles=legend, loc="outside right upper", frameon=False, fontsize=8.5)
    figures.title(figure, title, *([_widths(others)] if crowded else []))
    return figures.save(figure, path)


def _others(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    return [row for row in rows if row["method"] != FULL]


def _size(panels: int, legend: Sequence[Line2D]) -> tuple[float, float]:
    """Inches, with room for the legend beside the panels."""
    names = [str(line.get_label()).split("\n") for line in legend]
    width = 0.7 + 0.075 * max(len(line) for name in names for line in name)
    return 0.6 + 3.6 * panels + width, max(3.7, 0.3 + sum(0.08 + 0.15 * len(name) for name in names))


def _style(number: int) -> dict[str, Any]:
    mark = MARKS[number % len(MARKS)]
    colour, line = COLOURS[number % len(COLOURS)], "-" if number < len(COLOURS) else (0, (3, 1.5))
    return {"color": colour, "marker": mark, "markersize": 6, "linewidth": 1.3, "linestyle": line}


def _line(axes: Axes, points: Sequence[tuple[float, SummaryRow]], style: Mapping[str, Any], intervals: bool) -> None:
    """The budgets of one method, joined."""
    xs, means = [x for x, _ in points], [row["score"]["mean"] for _, row in points]
    if intervals:
        low, high = zip(*(row["score"]["ci95"] or [row["score"]["mean"]] * 2 for _, row in points), strict=True)
        axes.vlines(xs, low, high, color=style["color"], linewidth=2.2, alpha=0.3, zorder=2)
    axes.plot(xs, means, **style, markeredgecolor="white", markeredgewidth=0.5, zorder=3, clip_on=False)


def _full(axes: Axes, panel: Panel, rows: Sequence[SummaryRow]) -> None:
    full = [row for row in rows if row["method"] == FULL and row["score"]["mean"] is not None]
    for row in full:
        axes.axhline(row["score"]["mean"], color=figures.INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    for points in panel.points(full).values():
        axes.plot(
            [x for x, _ in points], [row["score"]["mean"] for _, row in points],
            color=figures.INK, marker="*", markersize=10, linestyle="", zorder=3, clip_on=False,
        )  # fmt: skip


def _front(axes: Axes, panel: Panel, rows: Sequence[SummaryRow]) -> None:
    points = [point for line in panel.points(rows).values() for point in line if point[1]["status"] == "complete"]
    pairs = [(x, row["score"]["mean"]) for x, row in points]
    if front := sorted({pairs[i] for i in costs.front(pairs)}):
        axes.plot(*zip(*front, strict=True), drawstyle="steps-post", color=figures.SOFT, linewidth=0.9, linestyle=":")


def _widths(rows: Sequence[SummaryRow]) -> str:
    """Return the widths of intervals; none are drawn where they would cover too much."""
    halves = [(row["score"]["ci95"][1] - row["score"]["ci95"][0]) / 2 for row in rows if row["score"]["ci95"]]
    return f"95 % intervals: about ±{100 * median(halves):.0f} points (median of the rows)" if halves else ""


def _legend(rows: Sequence[SummaryRow], labels: Sequence[str]) -> list[Line2D]:
    """A line for each method, Full first; long names are broken at spaces, never cut."""
    full = sorted({row["label"] for row in rows if row["method"] == FULL})
    star = {"color": figures.INK, "marker": "*", "markersize": 9, "linewidth": 0.8, "linestyle": (0, (4, 3))}
    styles = [(label, star) for label in full] + [(label, _style(number)) for number, label in enumerate(labels)]
    front = Line2D([], [], color=figures.SOFT, linewidth=0.9, linestyle=":", label="Pareto front")
    return [
        *(
            Line2D([], [], label=textwrap.fill(label, NAME_WIDTH, break_long_words=False), **style)
            for label, style in styles
        ),
        front,
    ]


def _finish(axes: Axes, panel: Panel, rows: Sequence[SummaryRow]) -> None:
    axes.set_xlabel(panel.title(rows))
    if panel.log:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.set_xticks([share for share in SHARES if low <= share <= high])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        if axes.dataLim.xmin < 0.4 * axes.dataLim.xmax:  # else from 0 on would leave the lines too little room
            axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    figures.framed(axes)
