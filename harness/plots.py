"""Pictures from results: the needle heat map, and score against cost. Small PNG files, no display needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from harness.records import Record

Row = Mapping[str, Any]  # a summary, with `label` naming its line
INK, FAINT = "#222222", "#d9d9d9"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b5b5b")  # told apart by all eyes
MARKS = "osD^vPX"


def has_heatmap(records: Sequence[Record]) -> bool:
    """Whether there is more than one cell to draw."""
    return len(_cells(records)) > 1


def has_frontier(rows: Sequence[Row]) -> bool:
    """Whether there is another method beside Full, with a score and a cost."""
    return any(row["method"] != "full" and any(_known(row, cost) for _, cost, _ in PANELS) for row in rows)


def heatmap(records: Sequence[Record], path: Path, title: str) -> None:
    """Mean score over prompt length (x) and depth of the needle (y), from `data.length` and `data.depth` (percent)."""
    cells = _cells(records)
    if not cells:
        raise ValueError("a heat map needs records with data.length and data.depth, as the needle tasks write them")
    depths, lengths = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    grid = np.array([[np.mean(cells.get((d, n), [np.nan])) for n in lengths] for d in depths])
    figure = Figure(figsize=(2.2 + 0.72 * len(lengths), 1.7 + 0.36 * len(depths)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    _cell_values(axes, grid)
    axes.set_xticks(range(len(lengths)), [_tokens(n) for n in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g} %" for depth in depths])
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel("depth of the needle")
    axes.set_title(title, fontsize=11, color=INK, loc="left")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=axes, ticks=[0, 0.5, 1], aspect=30, pad=0.02)
    bar.ax.set_yticklabels(["0", "50", "100"])
    bar.outline.set_visible(False)
    figure.savefig(path, dpi=130)


def frontier(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Score with its interval against what a method reads, moves and waits; Full is the line across."""
    panels = [panel for panel in PANELS if any(_known(row, panel[1]) for row in rows)]
    if not panels:
        raise ValueError("nothing to draw: no row has a score with a cost beside it")
    figure = Figure(figsize=(0.8 + 4.1 * len(panels), 4.0), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
        _panel(axes, rows, *panel)
    first = figure.axes[0]
    first.set_ylabel("score (95 % interval)")
    first.set_ylim(-0.03, 1.03)
    first.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f}"))
    pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    named = {str(label): line for line, label in pairs}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=min(6, len(named)), frameon=False)
    if title:
        figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    figure.savefig(path, dpi=120)


def _panel(axes: Axes, rows: Sequence[Row], name: str, cost: Callable[[Row], float | None], unit: str) -> None:
    lines: dict[str, list[tuple[float, Row]]] = defaultdict(list)
    for row in rows:
        if (x := cost(row)) is not None and row["score"]["mean"] is not None:
            lines[row["label"]].append((x, row))
    labels = sorted({row["label"] for row in rows if row["method"] != "full"})
    for label, points in lines.items():
        points.sort(key=lambda point: point[0])
        full = points[0][1]["method"] == "full"
        number = labels.index(label) if not full else 0
        colour = INK if full else COLOURS[number % len(COLOURS)]
        xs, means = [x for x, _ in points], [row["score"]["mean"] for _, row in points]
        low, high = zip(*(row["score"]["ci95"] or [row["score"]["mean"]] * 2 for _, row in points), strict=True)
        errors = [np.maximum(0, np.subtract(means, low)), np.maximum(0, np.subtract(high, means))]
        axes.errorbar(
            xs, means, errors, label=label, color=colour, marker="*" if full else MARKS[number % len(MARKS)],
            markersize=10 if full else 5.5, linewidth=1.4, elinewidth=0.9, capsize=2.5, zorder=3,
        )  # fmt: skip
        if full:
            axes.axhline(means[0], color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xlabel(f"{name} ({unit})" if unit else name)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _share(row: Row) -> float | None:
    share = row["budget"]["attended"]["share"]
    return None if share is None else 100 * share


def _moved(row: Row) -> float | None:
    moved = row["memory"]["moved_bytes_per_step"]
    return None if moved is None else moved / 2**20


def _tpot(row: Row) -> float | None:
    seconds = row["tpot_s"]["p50"]
    return None if seconds is None else 1000 * seconds


PANELS: tuple[tuple[str, Callable[[Row], float | None], str], ...] = (
    ("prompt attended per step", _share, "%"),
    ("moved between tiers per step", _moved, "MiB"),
    ("time per output token, median", _tpot, "ms"),
)


def _known(row: Row, cost: Callable[[Row], float | None]) -> bool:
    return bool(cost(row)) and row["score"]["mean"] is not None


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
            axes.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=8, color="white" if dark else INK)


def _tokens(length: float) -> str:
    return f"{length / 1024:g}K" if length >= 1024 and length % 512 == 0 else f"{length:g}"
