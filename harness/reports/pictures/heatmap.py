"""The needle heat map: mean score over prompt length and depth, one picture per task of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.reports.needles import Needle, grid
from harness.reports.pictures import figures


def heatmap(needles: Sequence[Needle], path: Path, title: str) -> tuple[Path, Path]:
    """Mean scores, 0-100. The files drawn."""
    found = grid(needles)
    means = np.array(found.means, dtype=float)  # None becomes nan
    figure = Figure(
        figsize=(max(3.4, 1.9 + 0.72 * len(found.lengths)), 1.5 + 0.32 * len(found.depths)), layout="constrained"
    )
    _draw(figure, means, found.lengths, found.depths)
    figures.title(figure, title, f"mean score, 0-100, of {len(needles)} examples")
    return figures.save(figure, path)


def _draw(figure: Figure, grid: np.ndarray, lengths: Sequence[str], depths: Sequence[str]) -> None:
    axes = figure.subplots()
    axes.set_facecolor(figures.EMPTY)
    image = axes.pcolormesh(
        np.ma.masked_invalid(grid), cmap=figures.COLOURS, vmin=0, vmax=100, edgecolors="white", linewidth=1
    )
    axes.invert_yaxis()
    _write_values(axes, grid)
    axes.set_xticks(np.arange(len(lengths)) + 0.5, lengths)
    axes.set_yticks(np.arange(len(depths)) + 0.5, depths)
    axes.set_xlabel("prompt length asked for (tokens)")
    axes.set_ylabel("depth of the needle (%)")
    axes.spines[:].set_visible(False)
    figures.plain(axes)
    figures.colour_bar(figure, image, axes, ticks=[0, 25, 50, 75, 100])


def _write_values(axes: Axes, grid: np.ndarray) -> None:
    for (y, x), value in np.ndenumerate(grid):
        if not np.isnan(value):
            colour = "white" if value < 60 else figures.INK
            axes.text(x + 0.5, y + 0.5, f"{value:.0f}", ha="center", va="center", fontsize=8, color=colour)
