"""Where a needle is lost: what the layers held of it and how much attention it got, per token of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.reports.pictures import figures
from harness.results.triage import Line

PANELS = {"held": "tokens held", "mass": "attention on it", "full_mass": "Full's attention on it"}


def needle_map(lines: Sequence[Line], path: Path, title: str) -> tuple[Path, Path]:
    """Means over the answers that were followed, layer by token of the answer. The files drawn."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = dict(zip(PANELS, figure.subplots(1, len(PANELS), sharex=True, sharey=True), strict=True))
    grids = {name: mean_grid([line[name] for line in lines]) for name in PANELS}
    top = max(float(np.nanmax(grids[name])) for name in ("mass", "full_mass"))
    first = min(line["first"] for line in lines)
    for name, axes in panels.items():
        _draw(figure, axes, 100 * grids[name], 100 if name == "held" else 100 * top, first)
        axes.set_title(f"{PANELS[name]} (%)", fontsize=9, color=figures.INK)
    panels["held"].set_ylabel("layer")
    figures.title(figure, title, f"mean over {len(lines)} wrong answers")
    return figures.save(figure, path)


def mean_grid(grids: Sequence[Sequence[Sequence[float]]]) -> np.ndarray:
    """Over those that are long enough; empty columns where none is."""
    widest = max(len(grid[0]) for grid in grids)
    padded = [
        np.pad(np.array(grid, float), ((0, 0), (0, widest - len(grid[0]))), constant_values=np.nan) for grid in grids
    ]
    mean: np.ndarray = np.nanmean(padded, 0)
    return mean


def _draw(figure: Figure, axes: Axes, grid: np.ndarray, top: float, first: int) -> None:
    axes.set_facecolor(figures.EMPTY)
    places = np.arange(grid.shape[1] + 1) + first - 0.5
    image = axes.pcolormesh(
        places, np.arange(grid.shape[0] + 1) - 0.5, grid, cmap=figures.COLOURS, vmin=0, vmax=top or 1
    )
    axes.set_xlabel("token of the answer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[:].set_visible(False)
    figures.plain(axes)
    figures.colour_bar(figure, image, axes)
