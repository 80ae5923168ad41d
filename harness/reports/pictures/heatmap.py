"""Draws the needle heat map: mean score by prompt length and by the needle's depth in it. If all
runs have a single length, one map has a line for each run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.reports.pictures import figures
from harness.results.records import Record

BINS = 10  # of depth, where needles lie anywhere
MOST_ROWS = 21  # where a task plants at fixed depths, each is a row


class NeedleScore(NamedTuple):
    """The score of one example, with its prompt length and the depth of its needle."""

    depth: float  # percent of the text
    length: int  # tokens asked for
    score: float


class Grid(NamedTuple):
    """Mean scores (0-100) in a row per depth and a column per length; None in cells without a
    needle."""

    depths: list[str]  # percent: as planted, or a bin
    lengths: list[str]  # tokens asked for
    means: list[list[float | None]]


def needles_by_task(records: Sequence[Record]) -> dict[str, list[NeedleScore]]:
    """Return, by task, the examples whose needle has a known length and depth; tasks whose examples
    all have the same length and depth are left out."""
    tasks: dict[str, list[NeedleScore]] = defaultdict(list)
    for record in records:
        if {"length", "depth"} <= record.data.keys():
            needle = NeedleScore(record.data["depth"], record.data["length"], record.score)
            task = record.data.get("task") or record.group.partition("/")[0]
            tasks[str(task)].append(needle)
    return {
        task: needles
        for task, needles in tasks.items()
        if len({needle[:2] for needle in needles}) > 1
    }


def grid(needles: Sequence[NeedleScore]) -> Grid:
    """Sort needles into a grid of mean scores. If the task plants at fixed depths, each depth is a
    row; otherwise depths are sorted into ten bins."""
    lengths = sorted({needle.length for needle in needles})
    depths = sorted({needle.depth for needle in needles})
    steps = [b - a for a, b in pairwise(depths)]
    # a run that broke off lacks some depths at its last length
    whole = any(
        len({n.depth for n in needles if n.length == length}) == len(depths) for length in lengths
    )
    even = bool(steps) and max(steps) - min(steps) < 0.5
    planted = len(depths) <= MOST_ROWS and whole and (even or len(lengths) > 1)
    cells: dict[tuple[int, int], list[float]] = defaultdict(list)
    for depth, length, score in needles:
        row = depths.index(depth) if planted else min(BINS - 1, int(depth * BINS / 100))
        cells[row, lengths.index(length)].append(100 * score)
    rows = (
        [f"{depth:g}" for depth in depths]
        if planted
        else [f"{10 * row}-{10 * row + 10}" for row in range(BINS)]
    )
    means: list[list[float | None]] = [[None] * len(lengths) for _ in rows]
    for (y, x), scores in cells.items():
        means[y][x] = fmean(scores)
    tokens = [
        f"{length / 1024:g}K" if length >= 1024 and length % 512 == 0 else f"{length:g}"
        for length in lengths
    ]
    return Grid(rows, tokens, means)


def heatmap(needles: Sequence[NeedleScore], title: str) -> Figure:
    """Draw the mean scores of one run by length and depth."""
    cells = grid(needles)
    size = (max(3.4, 1.9 + 0.72 * len(cells.lengths)), 1.5 + 0.32 * len(cells.depths))
    figure = Figure(figsize=size, layout="constrained")
    axes = _cells(figure, cells.means, cells.lengths, cells.depths)
    axes.set_xlabel("prompt length asked for (tokens)")
    axes.set_ylabel("depth of the needle (%)")
    figures.title(figure, title, f"mean score, 0-100, of {len(needles)} examples")
    return figure


def are_flat(grids: Sequence[Grid]) -> bool:
    """Return True if there are several grids, all with the same single length and the same depths,
    so that one picture with a line per run can show them."""
    axes = {(*other.lengths, *other.depths) for other in grids}
    return len(grids) > 1 and len(axes) == 1 and len(grids[0].lengths) == 1


def heatmap_by_run(grids: Mapping[str, Grid], title: str) -> Figure:
    """Draw grids of a single length in one map, with a line for each run; `grids` is by the run's
    name."""
    first = next(iter(grids.values()))
    figure = Figure(
        figsize=(3 + 0.55 * len(first.depths), 1.5 + 0.21 * len(grids)), layout="constrained"
    )
    means = [[line[0] for line in cells.means] for cells in grids.values()]
    axes = _cells(figure, means, first.depths, list(grids))
    axes.set_xlabel("depth of the needle (%)")
    figures.title(figure, title, f"mean score, 0-100, at a length of {first.lengths[0]} tokens")
    return figure


def _cells(
    figure: Figure, means: Sequence[Sequence[float | None]], across: list[str], down: list[str]
) -> Axes:
    values = np.array(means, dtype=float)  # None becomes nan
    axes: Axes = figure.subplots()
    axes.set_facecolor(figures.EMPTY)
    image = axes.pcolormesh(
        np.ma.masked_invalid(values),
        cmap=figures.COLOURS,
        vmin=0,
        vmax=100,
        edgecolors="white",
        linewidth=1,
    )
    axes.invert_yaxis()
    axes.set_xticks(np.arange(len(across)) + 0.5, across)
    axes.set_yticks(np.arange(len(down)) + 0.5, down)
    axes.spines[:].set_visible(False)
    figures.plain(axes)
    bar = figure.colorbar(image, ax=axes, aspect=30, pad=0.02, ticks=(0, 25, 50, 75, 100))
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=figures.SOFT)
    bar.outline.set_visible(False)
    for (y, x), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "white" if value < 60 else figures.INK
            axes.text(
                x + 0.5, y + 0.5, f"{value:.0f}", ha="center", va="center", fontsize=8, color=colour
            )
    return axes
