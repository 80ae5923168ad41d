"""Pictures from results: the needle heat map, and score against cost. Small PNG files, no display needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from PIL import Image  # matplotlib's own dependency

from harness.records import Record

Row = Mapping[str, Any]  # a summary, with `label` naming its line

INK, SOFT, GRID = "#222222", "#666666", "#e3e3e3"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")  # told apart by all eyes
MARKS = "osD^vPX"
SHARES = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True, slots=True)
class Panel:
    """One cost to hold the score against; rows without it, or where it is 0, are not drawn."""

    name: str
    cost: Callable[[Row], float | None]
    log: bool = False

    def points(self, rows: Sequence[Row]) -> dict[str, list[tuple[float, Row]]]:
        lines: dict[str, list[tuple[float, Row]]] = defaultdict(list)
        for row in rows:
            if row["score"]["mean"] is not None and (x := self.cost(row)):
                lines[row["label"]].append((x, row))
        return {label: sorted(points, key=lambda point: point[0]) for label, points in lines.items()}


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


PANELS = (
    Panel("prompt read per step (%)", lambda row: _scaled(row["budget"]["attended"]["share"], 100), log=True),
    Panel("moved between tiers per step (MiB)", lambda row: _scaled(row["memory"]["moved_bytes_per_step"], 2**-20)),
    Panel("median time per output token (ms)", lambda row: _scaled(row["tpot_s"]["p50"], 1000)),
)


def has_heatmap(records: Sequence[Record]) -> bool:
    """Whether there is more than one cell to draw."""
    return len(_cells(records)) > 1


def has_frontier(rows: Sequence[Row]) -> bool:
    """Whether there is another method beside Full, with a score and a cost."""
    others = [row for row in rows if row["method"] != "full"]
    return any(panel.points(others) for panel in PANELS)


def heatmap(records: Sequence[Record], path: Path, title: str) -> None:
    """Mean score over prompt length (x) and depth of the needle (y), from `data.length` and `data.depth` (percent)."""
    cells = _cells(records)
    if not cells:
        raise ValueError("a heat map needs records with data.length and data.depth, as the needle tasks write them")
    depths, lengths = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    grid = np.array([[np.mean(cells.get((d, n), [np.nan])) for n in lengths] for d in depths])
    width = max(4.6, 1.9 + 0.72 * len(lengths), 0.075 * len(title) + 0.6)
    figure = Figure(figsize=(width, 1.5 + 0.36 * len(depths)), layout="constrained")
    axes = figure.subplots()
    image = axes.pcolormesh(grid, cmap="RdYlGn", vmin=0, vmax=1, edgecolors="white", linewidth=1.2)
    axes.invert_yaxis()
    _cell_values(axes, grid)
    axes.set_xticks(np.arange(len(lengths)) + 0.5, [_tokens(n) for n in lengths])
    axes.set_yticks(np.arange(len(depths)) + 0.5, [f"{depth:g} %" for depth in depths])
    axes.set_xlabel("prompt length (tokens)", color=SOFT, fontsize=9)
    axes.set_ylabel("depth of the needle", color=SOFT, fontsize=9)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    bar = figure.colorbar(image, ax=axes, ticks=[0, 0.5, 1], aspect=30, pad=0.02)
    bar.ax.set_yticklabels(["0", "50", "100"], fontsize=8, color=SOFT)
    bar.ax.tick_params(length=0)
    bar.outline.set_visible(False)
    _title(figure, title)
    _save(figure, path)


def frontier(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Score with its interval against what a method reads, moves and waits; Full is the dashed line."""
    panels = [panel for panel in PANELS if panel.points(rows)]
    if not panels:
        raise ValueError("nothing to draw: no row has a score with a cost beside it")
    figure = Figure(figsize=(0.8 + 3.7 * len(panels), 3.7), layout="constrained")
    labels = sorted({row["label"] for row in rows if row["method"] != "full"})
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
        for label, points in panel.points(rows).items():
            _line(axes, label, points, labels.index(label) if label in labels else None)
        _finish(axes, panel)
        for row in rows:
            if row["method"] == "full" and row["score"]["mean"] is not None:
                axes.axhline(row["score"]["mean"], color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    first = figure.axes[0]
    first.set_ylabel("score, 95 % interval", color=SOFT, fontsize=9)
    first.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f}"))
    first.set_ylim(max(-0.02, first.get_ylim()[0]), min(1.03, first.get_ylim()[1]))
    pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    named = {str(label): line for line, label in pairs}
    columns = min(len(named), 2 * len(panels) + 1)
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    _title(figure, title)
    _save(figure, path)


def _line(axes: Axes, label: str, points: Sequence[tuple[float, Row]], number: int | None) -> None:
    """The budgets of one method, joined; number None: Full."""
    colour = INK if number is None else COLOURS[number % len(COLOURS)]
    mark, size = ("*", 10) if number is None else (MARKS[number % len(MARKS)], 5)
    xs, means = [x for x, _ in points], [row["score"]["mean"] for _, row in points]
    low, high = zip(*(row["score"]["ci95"] or [row["score"]["mean"]] * 2 for _, row in points), strict=True)
    axes.vlines(xs, low, high, color=colour, linewidth=2.2, alpha=0.3, zorder=2)
    axes.plot(xs, means, color=colour, label=label, linewidth=1.3, marker=mark, markersize=size, zorder=3)


def _finish(axes: Axes, panel: Panel) -> None:
    axes.set_xlabel(panel.name, color=SOFT, fontsize=9)
    if panel.log:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.set_xticks([share for share in SHARES if low <= share <= high])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)


def _save(figure: Figure, path: Path) -> None:
    """At most about 1300 pixels wide, 256 colours: a page with many of them must stay light."""
    drawn = BytesIO()
    figure.savefig(drawn, dpi=min(130.0, 1300 / figure.get_size_inches()[0]))
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def _title(figure: Figure, title: str) -> None:
    if title:
        figure.suptitle(title, fontsize=10.5, color=INK, x=0.01, ha="left")


def _cells(records: Sequence[Record]) -> dict[tuple[float, float], list[float]]:
    """Scores by depth and length."""
    cells: dict[tuple[float, float], list[float]] = defaultdict(list)
    for record in records:
        if {"length", "depth"} <= record.data.keys():
            cells[record.data["depth"], record.data["length"]].append(record.score)
    return cells


def _cell_values(axes: Axes, grid: np.ndarray) -> None:
    for (y, x), value in np.ndenumerate(grid):
        if not np.isnan(value):
            dark = value < 0.12 or value > 0.9  # the ends of the colour map are dark
            colour = "white" if dark else INK
            axes.text(x + 0.5, y + 0.5, f"{100 * value:.0f}", ha="center", va="center", fontsize=8, color=colour)


def _tokens(length: float) -> str:
    return f"{length / 1024:g}K" if length >= 1024 and length % 512 == 0 else f"{length:g}"
