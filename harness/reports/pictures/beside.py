"""Writes short names beside the points of a panel, where they cover neither each other nor a point."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from harness.reports.pictures.figures import INK, extent

GAPS = (0.5, 4.0, 8.0)  # points between a mark and its name, the nearest first
RADIUS = 3.0  # points of a mark
SIDES = [(0, 1), (0, -1), (1, 0), (-1, 0), *product((1, -1), (1, -1))]  # above first
SAMPLES = 40  # places along a line between two points at which a name would cover it
SHADE = 0.65  # of a colour in which a name can be read
FAR = 2.0  # how many of these a name may cover rather than stand a point further away

Point = tuple[float, float]
Pixels = NDArray[np.float64]


class _Name(NamedTuple):
    """Hold what is written at one point: texts and colours of all that meet there, as keys."""

    point: Point
    place: Pixels
    texts: dict[str, None]
    colours: dict[Any, None]


def write_beside(axes: Axes, named: Iterable[tuple[Point, str, Any]], size: float) -> int:
    """Write names beside points (in data), in a darker shade of their colours and type of `size` points,
    and return how many points found no room for theirs in the panel. The figure's layout must be
    final. Names of one point are written together, and a name once where its points meet; a name
    covers a line only where it must."""
    pixels = axes.figure.dpi / 72  # of a point of type
    radius = RADIUS * pixels
    names = list[_Name]()
    for point, text, colour in named:
        place: Pixels = axes.transData.transform(point)
        near = [one for one in names if np.hypot(*(one.place - place)) < radius]
        same = next((one for one in near if text in one.texts or point == one.point), None)
        if same is None:
            names.append(same := _Name(point, place, {}, {}))
        same.texts[text] = same.colours[colour] = None
    taken = [np.concatenate([one.place - radius, one.place + radius]) for one in names]
    lines = _lines(axes)
    inside = np.array(axes.bbox.extents)
    without = 0
    for point, place, texts, colours in names:
        name = ", ".join(texts)
        half = np.array(extent(axes, name, size)) / 2
        choices = []
        for gap, side in product(GAPS, SIDES):
            shift = np.array(side) * (half + radius + gap * pixels)
            low, high = place + shift - half, place + shift + half
            box = np.concatenate([low, high])
            if (low < inside[:2]).any() or (high > inside[2:]).any() or _meets(box, taken):
                continue
            covers = ((lines > low) & (lines < high)).all(axis=1).sum()
            choices.append((covers + FAR * gap, shift, box))
        if not choices:
            without += 1
            continue
        _, shift, box = min(choices, key=lambda choice: choice[0])
        taken.append(box)
        axes.annotate(
            name,
            point,
            tuple(shift / pixels),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=size,
            color=tuple(SHADE * np.array(to_rgb(*colours))) if len(colours) == 1 else INK,
            path_effects=[withStroke(linewidth=1.5, foreground="white")],
            zorder=4,
        ).set_in_layout(False)
    return without


def _meets(box: Pixels, others: Sequence[Pixels]) -> bool:
    known = np.array(others)
    return bool(((box[:2] < known[:, 2:]) & (box[2:] > known[:, :2])).all(axis=1).any())


def _lines(axes: Axes) -> Pixels:
    """Return places along all lines of a panel, in pixels [N 2]."""
    paths = [line.get_transform().transform(line.get_xydata()) for line in axes.lines]
    for many in axes.collections:
        if isinstance(many, LineCollection):
            paths += [axes.transData.transform(segment) for segment in many.get_segments()]
    steps = np.linspace(0, 1, SAMPLES)[:, None, None]
    between = [(path[:-1] + steps * np.diff(path, axis=0)).reshape(-1, 2) for path in paths]
    return np.concatenate([np.empty((0, 2)), *between])
