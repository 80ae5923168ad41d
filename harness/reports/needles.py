"""Sorts needle scores into the cells of the heat map, by length and depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from harness.results.records import Record

BINS = 10  # of depth, where needles lie anywhere
MOST_ROWS = 21  # where a task plants at fixed depths, each is a row


class NeedleScore(NamedTuple):
    """Holds the score of one example by its length and depth."""

    depth: float  # percent of the text
    length: int  # tokens asked for
    score: float


class Grid(NamedTuple):
    """Mean scores, 0-100, a row per depth and a column per length; None where no needle lies."""

    depths: list[str]  # percent: as planted, or a bin
    lengths: list[str]  # tokens asked for
    means: list[list[float | None]]
    counts: list[list[int]]  # of examples


def by_task(records: Sequence[Record]) -> dict[str, list[NeedleScore]]:
    """Examples that know their needle's place; only tasks whose examples fill more than one cell."""
    found: dict[str, list[NeedleScore]] = defaultdict(list)
    for record in records:
        if {"length", "depth"} <= record.data.keys():
            needle = NeedleScore(record.data["depth"], record.data["length"], record.score)
            found[str(record.data.get("task") or record.group.partition("/")[0])].append(needle)
    return {task: needles for task, needles in found.items() if len({needle[:2] for needle in needles}) > 1}


def grid(needles: Sequence[NeedleScore]) -> Grid:
    lengths, depths = sorted({needle.length for needle in needles}), _fixed_depths(needles)
    cells: dict[tuple[int, int], list[float]] = defaultdict(list)
    for depth, length, score in needles:
        row = depths.index(depth) if depths else min(BINS - 1, int(depth * BINS / 100))
        cells[row, lengths.index(length)].append(100 * score)
    rows, columns = range(len(depths) or BINS), range(len(lengths))
    means = [[fmean(cells[y, x]) if (y, x) in cells else None for x in columns] for y in rows]
    sizes = [[len(cells[y, x]) if (y, x) in cells else 0 for x in columns] for y in rows]
    told = [f"{depth:g}" for depth in depths] or [f"{10 * row}-{10 * row + 10}" for row in rows]
    return Grid(told, [_tokens(length) for length in lengths], means, sizes)


def _fixed_depths(needles: Sequence[NeedleScore]) -> list[float]:
    """The depths of a grid, one length of which has them all (a run that broke off lacks some at others); empty where
    needles lie anywhere, and have to share bins."""
    depths = sorted({needle.depth for needle in needles})
    lengths = {needle.length for needle in needles}
    whole = any(len({needle.depth for needle in needles if needle.length == one}) == len(depths) for one in lengths)
    steps = [b - a for a, b in pairwise(depths)]
    even = bool(steps) and max(steps) - min(steps) < 0.5
    return depths if len(depths) <= MOST_ROWS and whole and (even or len(lengths) > 1) else []


def _tokens(length: float) -> str:
    return f"{length / 1024:g}K" if length >= 1024 and length % 512 == 0 else f"{length:g}"
