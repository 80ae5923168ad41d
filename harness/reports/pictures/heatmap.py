"""Draws maps of needles: mean score by prompt length and by the needle's depth in it. If all prompts
of a task have one length, its map has a line for each run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from harness.reports.compare import Comparison
from harness.reports.pictures import figures
from harness.reports.pictures.figures import Drawn, Look
from harness.reports.pictures.lines import named
from harness.results.records import Record

EMPTY = "#f0f0f0"  # of cells without a needle
BINS = 10  # of depth, where needles lie anywhere
MOST_ROWS = 21  # where a task plants at fixed depths, each is a row


class NeedleScore(NamedTuple):
    """The score of one example, with its prompt length and the depth of its needle."""

    depth: float  # percent of the text
    length: int  # tokens asked for
    score: float


class Grid(NamedTuple):
    """A panel: mean scores (0-100) in rows and columns that have names; None in cells without a
    needle. `edges`: where rows begin and end. Depths lie true to scale."""

    down: list[str]  # depths in percent, as planted or a bin
    across: list[str]  # tokens asked for
    means: list[list[float | None]]
    edges: list[float]


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
    edges: list[float] = [100 * edge / BINS for edge in range(BINS + 1)]
    rows = [f"{low:g}-{high:g}" for low, high in pairwise(edges)]
    if planted:
        rows = [f"{depth:g}" for depth in depths]
        middles = [(a + b) / 2 for a, b in pairwise(depths)] or [depths[0] + 0.5]
        edges = [2 * depths[0] - middles[0], *middles, 2 * depths[-1] - middles[-1]]
    means: list[list[float | None]] = [[None] * len(lengths) for _ in rows]
    for (y, x), scores in cells.items():
        means[y][x] = fmean(scores)
    names = [figures.tokens(length) for length in lengths]
    return Grid(rows, names, means, edges)


def needles(tables: Sequence[Comparison], look: Look) -> Drawn | str:
    """Draw a map for each run of a task, or one with a line per run if all its prompts have one
    length."""
    tasks = _by_task(tables)
    if not tasks:
        return "no run hides needles at several depths or lengths: run task=niah, or needles of task=ruler"
    by_run = all(map(are_flat, tasks.values()))
    if by_run:
        grids = {task: _of_runs(by_name) for task, by_name in tasks.items()}
    else:
        grids = {
            ", ".join([name, *[task] * (len(tasks) > 1)]): cells
            for task, by_name in tasks.items()
            for name, cells in by_name.items()
        }
    lines = max(len(cells.down) for cells in grids.values())
    columns = max(len(cells.across) for cells in grids.values())
    height = 1.7 * look.small / 72 * lines
    drawn = figures.panels(len(grids), look, 1.3 + 0.4 * columns, height, aside=0.6)
    names = {(*cells.down, "", *cells.across) for cells in grids.values()}
    for axes, (heading, cells) in zip(drawn.axes, grids.items(), strict=True):
        image = axes.pcolormesh(
            range(len(cells.across) + 1),
            cells.edges,
            np.ma.masked_invalid(np.array(cells.means, dtype=float)),
            vmin=0,
            vmax=100,
            edgecolors="white",
            linewidth=0.6,
        )
        axes.set_facecolor(EMPTY)
        axes.invert_yaxis()
        axes.set_xticks(np.arange(len(cells.across)) + 0.5, cells.across)
        axes.set_yticks([(a + b) / 2 for a, b in pairwise(cells.edges)], cells.down)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.set_title(drawn.fill(heading))
    if len(names) == 1:
        drawn.share_names()
    depth = "depth of the needle (%)"
    drawn.figure.supxlabel(depth if by_run else "prompt (tokens)")
    drawn.figure.supylabel("" if by_run else depth)
    ticks = (0, 25, 50, 75, 100)
    bar = drawn.figure.colorbar(image, ax=drawn.axes, aspect=30, pad=0.02, ticks=ticks)
    bar.outline.set_visible(False)
    bar.set_label("score (0-100)")
    figures.lay_out(drawn, look)
    for axes, cells in zip(drawn.axes, grids.values(), strict=True):
        figures.spaced(axes)
        _write(axes, cells, look.small)
    return Drawn(drawn.figure, "Mean score of needles by their depth and the length of the prompt")


def are_flat(grids: Mapping[str, Grid]) -> bool:
    """Return True if there are several grids, all with the same single length and the same depths,
    so that one map with a line per run can show them."""
    axes = {(*cells.across, *cells.down) for cells in grids.values()}
    return len(grids) > 1 and len(axes) == 1 and len(next(iter(grids.values())).across) == 1


def _by_task(tables: Sequence[Comparison]) -> dict[str, dict[str, Grid]]:
    """Return the grids of each task by the run's name. The task is named as its table is, and by its own
    name where a table holds several."""
    tasks: dict[str, dict[str, Grid]] = defaultdict(dict)
    for table in tables:
        runs = {named(row): needles_by_task(row.run.records) for row in table.entries}
        several = len({task for found in runs.values() for task in found}) > 1
        for name, found in runs.items():
            for task, scores in found.items():
                words = [table.title, figures.literal(task) * (several or not table.title)]
                tasks[", ".join(filter(None, words))][name] = grid(scores)
    return tasks


def _of_runs(grids: Mapping[str, Grid]) -> Grid:
    """Return one grid with a line for each of these, which are flat, and depths across."""
    first = next(iter(grids.values()))
    means = [[line[0] for line in cells.means] for cells in grids.values()]
    return Grid(list(grids), first.down, means, list(map(float, range(len(grids) + 1))))


def _write(axes: Axes, cells: Grid, size: float) -> None:
    """Write the scores into the cells that are large enough. The figure's layout must be final."""
    width, height = figures.extent(axes, "100", size)
    for y, (low, high) in enumerate(pairwise(cells.edges)):
        (left, top), (right, bottom) = axes.transData.transform([(0, low), (1, high)])
        if right - left < 1.1 * width or top - bottom < 1.3 * height:
            continue
        for x, value in enumerate(cells.means[y]):
            if value is not None:
                colour = "white" if value < 60 else figures.INK
                axes.text(
                    x + 0.5,
                    (low + high) / 2,
                    f"{value:.0f}",
                    ha="center",
                    va="center",
                    fontsize=size,
                    color=colour,
                )
