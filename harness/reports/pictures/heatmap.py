"""The needle heat map: mean score over prompt length and depth, one picture per task of a run; of one length, one per
task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.reports.needles import Grid, NeedleScore, grid
from harness.reports.pictures import figures


def heatmap(needles: Sequence[NeedleScore], path: Path, title: str) -> tuple[Path, Path]:
    """Mean scores, 0-100. The files drawn."""
    found = grid(needles)
    means = np.array(found.means, dtype=float)  # None becomes nan
    figure = Figure(
        figsize=(max(3.4, 1.9 + 0.72 * len(found.lengths)), 1.5 + 0.32 * len(found.depths)), layout="constrained"
    )
    axes = _draw(figure, means, found.lengths, found.depths)
    axes.set_xlabel("prompt length asked for (tokens)")
    axes.set_ylabel("depth of the needle (%)")
    figures.title(figure, title, f"mean score, 0-100, of {len(needles)} examples")
    return figures.save(figure, path)


def is_flat(grids: Sequence[Grid]) -> bool:
    """Several runs of one length and the same depths: a column each would waste a picture each."""
    return len(grids) > 1 and len({(*one.lengths, *one.depths) for one in grids}) == 1 == len(grids[0].lengths)


def by_run(grids: Mapping[str, Grid], path: Path, title: str) -> tuple[Path, Path]:
    """Flat ones, a line for each run. The files drawn."""
    first = next(iter(grids.values()))
    means = np.array([[line[0] for line in one.means] for one in grids.values()], dtype=float)
    figure = Figure(figsize=(3 + 0.55 * len(first.depths), 1.5 + 0.21 * len(grids)), layout="constrained")
    axes = _draw(figure, means, first.depths, list(grids))
    axes.set_xlabel("depth of the needle (%)")
    counts = sum(line[0] for line in first.counts)
    told = f"mean score, 0-100, of {counts} examples at a length of {first.lengths[0]} tokens"
    figures.title(figure, title, *figures.wrapped(figure, told))
    return figures.save(figure, path)


def _draw(figure: Figure, grid: np.ndarray, across: Sequence[str], down: Sequence[str]) -> Axes:
    axes: Axes = figure.subplots()
    cells, ticks = np.ma.masked_invalid(grid), (0, 25, 50, 75, 100)
    _mesh(figure, axes, cells, ticks=ticks, vmax=100, edgecolors="white", linewidth=1)
    axes.invert_yaxis()
    _write_values(axes, grid)
    axes.set_xticks(np.arange(len(across)) + 0.5, across)
    axes.set_yticks(np.arange(len(down)) + 0.5, down)
    return axes


def _write_values(axes: Axes, grid: np.ndarray) -> None:
    for (y, x), value in np.ndenumerate(grid):
        if not np.isnan(value):
            colour = "white" if value < 60 else figures.INK
            axes.text(x + 0.5, y + 0.5, f"{value:.0f}", ha="center", va="center", fontsize=8, color=colour)


def _mesh(figure: Figure, axes: Axes, *grid: np.ndarray, ticks: Sequence[float] | None = None, **how: Any) -> None:
    """Coloured cells from 0 up, with their bar."""
    axes.set_facecolor(figures.EMPTY)
    image = axes.pcolormesh(*grid, cmap=figures.COLOURS, vmin=0, **how)
    axes.spines[:].set_visible(False)
    figures.plain(axes)
    figures.colour_bar(figure, image, axes, ticks=ticks)
