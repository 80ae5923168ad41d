"""Helpers that all pictures of a report share: colours, titles, and small files."""

from __future__ import annotations

import textwrap
from io import BytesIO
from pathlib import Path
from typing import Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image  # matplotlib's own dependency

from kernels.temporary import replacing

INK, SOFT, GRID, EMPTY = "#222222", "#666666", "#e3e3e3", "#f0f0f0"
COLOURS = "cividis"  # of a map: even steps, and the same to all eyes
DPI = 160
WIDEST = 2400  # pixels
MOST = 100  # rows or lines of a picture; a taller one is slow to draw and shown nowhere


def plain(axes: Axes) -> None:
    """Style ticks and labels: grey and small, without tick marks."""
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    axes.xaxis.label.set(color=SOFT, fontsize=9)
    axes.yaxis.label.set(color=SOFT, fontsize=9)
    axes.title.set(color=INK, fontsize=9)


def framed(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """Draw grid lines to read values by, and leave only the left and the bottom line of the
    frame."""
    axes.grid(axis=grid, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    plain(axes)


def wrapped(figure: Figure, text: str) -> list[str]:
    """Break a text into lines that are no wider than the figure, at spaces only."""
    return textwrap.wrap(text, int(11 * figure.get_size_inches()[0]), break_long_words=False)


def title(figure: Figure, text: str, *below: str) -> None:
    """Set the figure's title; each of `below` is a line of its own under it."""
    if lines := [*wrapped(figure, text), *below]:
        figure.suptitle("\n".join(lines), fontsize=10, color=INK, x=0.01, ha="left")


def png(figure: Figure) -> bytes:
    """Return a figure as PNG bytes in 256 colours, which keeps a page with many pictures small.
    Text outside the axes is not cut off."""
    drawn, reduced = BytesIO(), BytesIO()
    figure.savefig(
        drawn,
        dpi=min(DPI, WIDEST / figure.get_size_inches()[0]),
        bbox_inches="tight",
        pad_inches=0.1,
    )
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        reduced, "PNG", optimize=True
    )
    return reduced.getvalue()


def save(figure: Figure, path: Path) -> tuple[Path, Path]:
    """Write the figure as PNG to `path` and as PDF with the same name; return both paths."""
    printed, vector = BytesIO(), path.with_suffix(".pdf")
    with replacing(path) as file:  # not through a link that a folder of somebody else's has there
        file.write(png(figure))
    with rc_context({"pdf.fonttype": 42}):  # TrueType: publishers refuse matplotlib's Type 3
        figure.savefig(
            printed,
            format="pdf",
            bbox_inches="tight",
            pad_inches=0.1,
            metadata={"CreationDate": None},
        )
    with replacing(vector) as file:
        # in memory first: matplotlib makes another error of a full disk
        file.write(printed.getvalue())
    return path, vector


def side_by_side(panels: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels in a row, and their axes. No display is needed."""
    figure = Figure(figsize=(4.6 * panels, 3.6), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])
