"""The needle heat map: mean score over prompt length and depth, one picture per task of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.reports import figures
from harness.results.records import Record

BINS = 10  # of depth, where needles lie anywhere
MOST_ROWS = 21  # where a task plants at fixed depths, each is a row
COLOURS = "cividis"  # even steps, and the same to all eyes
EMPTY = "#f0f0f0"


class Needle(NamedTuple):
    """One example."""

    depth: float  # percent of the text
    length: int  # tokens asked for
    score: float


def by_task(records: Sequence[Record]) -> dict[str, list[Needle]]:
    """Examples that know their needle's place; only tasks whose examples fill more than one cell."""
    lines: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if {"length", "depth"} <= record.data.keys():
            lines[str(record.data.get("task") or record.group.partition("/")[0])].append(record)
    found = {task: _needles(some) for task, some in lines.items()}
    return {task: needles for task, needles in found.items() if len({needle[:2] for needle in needles}) > 1}


def heatmap(needles: Sequence[Needle], path: Path, title: str) -> None:
    """Mean scores, 0-100."""
    lengths, depths = sorted({needle.length for needle in needles}), _fixed_depths(needles)
    rows = depths or range(BINS)
    cells: dict[tuple[int, int], list[float]] = defaultdict(list)
    for depth, length, score in needles:
        row = depths.index(depth) if depths else min(BINS - 1, int(depth * BINS / 100))
        cells[row, lengths.index(length)].append(100 * score)
    grid = np.array([[np.mean(cells.get((y, x), [np.nan])) for x in range(len(lengths))] for y in range(len(rows))])
    names = [f"{depth:g}" for depth in depths] or [f"{10 * row}-{10 * row + 10}" for row in rows]
    figure = Figure(figsize=(max(3.4, 1.9 + 0.72 * len(lengths)), 1.5 + 0.32 * len(rows)), layout="constrained")
    _draw(figure, grid, [_tokens(length) for length in lengths], names)
    figures.title(figure, title, f"mean score, 0-100, of {len(needles)} examples")
    figures.save(figure, path)


def _needles(records: Sequence[Record]) -> list[Needle]:
    """RULER once wrote shares in place of percents: no needle of its lay deeper than 1 then."""
    scale = 100 if all(record.data["depth"] <= 1 for record in records) else 1
    return [Needle(scale * record.data["depth"], record.data["length"], record.score) for record in records]


def _fixed_depths(needles: Sequence[Needle]) -> list[float]:
    """The depths of a grid that every length has; empty where needles lie anywhere, and have to share bins."""
    depths = sorted({needle.depth for needle in needles})
    lengths = {needle.length for needle in needles}
    whole = len({needle[:2] for needle in needles}) == len(depths) * len(lengths)
    even = len(depths) > 1 and np.ptp(np.diff(depths)) < 0.5
    return depths if len(depths) <= MOST_ROWS and whole and (even or len(lengths) > 1) else []


def _draw(figure: Figure, grid: np.ndarray, lengths: Sequence[str], depths: Sequence[str]) -> None:
    axes = figure.subplots()
    axes.set_facecolor(EMPTY)
    image = axes.pcolormesh(np.ma.masked_invalid(grid), cmap=COLOURS, vmin=0, vmax=100, edgecolors="white", linewidth=1)
    axes.invert_yaxis()
    _write_values(axes, grid)
    axes.set_xticks(np.arange(len(lengths)) + 0.5, lengths)
    axes.set_yticks(np.arange(len(depths)) + 0.5, depths)
    axes.set_xlabel("prompt length asked for (tokens)")
    axes.set_ylabel("depth of the needle (%)")
    axes.spines[:].set_visible(False)
    figures.plain(axes)
    bar = figure.colorbar(image, ax=axes, ticks=[0, 25, 50, 75, 100], aspect=30, pad=0.02)
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=figures.SOFT)
    bar.outline.set_visible(False)


def _write_values(axes: Axes, grid: np.ndarray) -> None:
    for (y, x), value in np.ndenumerate(grid):
        if not np.isnan(value):
            colour = "white" if value < 60 else figures.INK
            axes.text(x + 0.5, y + 0.5, f"{value:.0f}", ha="center", va="center", fontsize=8, color=colour)


def _tokens(length: float) -> str:
    return f"{length / 1024:g}K" if length >= 1024 and length % 512 == 0 else f"{length:g}"
