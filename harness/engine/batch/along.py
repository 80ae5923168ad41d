"""Follows the costs of one answer along its length, in stretches of which each is twice as long as
the one before. At the end of each stretch the counts so far are noted, without waiting for the
device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

FIRST = 64  # decode steps of the first stretch; each further one is as long as all before it


class Mark(NamedTuple):
    """Hold what has been counted of an answer at the end of a stretch of it. Counts of layers that keep them on the
    device are there as well: `waiting` says how many of them belong to the steps so far."""

    steps: int = 0
    # prompt tokens read, summed over steps and layers, where the counts are in Python
    prompt_reads: float = 0.0
    waiting: int = 0  # counts of prompt tokens read that lie on the device, one per note and layer
    # generated tokens read, summed over steps, mean over layers
    generated_reads: float | Tensor = 0.0
    moved_bytes: int = 0
    # a copy of the moved bytes that only the device has counted
    moved_on_device: Tensor | None = None
    unused_bytes: int = 0  # reserved for rows to come


def ends_stretch(steps: int, marks: int) -> bool:
    """Return True if an answer of so many steps has reached the end of its present stretch.
    `marks`: how many stretches have ended before."""
    return steps >= FIRST << marks


def along(
    marks: Sequence[Mark], waiting: Tensor | None, layers: int, held_bytes: int
) -> dict[str, list[float]]:
    """Return the costs of an answer, a number per stretch: `steps` up to its end; `attended` tokens (of prompt and
    answer, mean over steps and layers) and `moved_bytes` of its steps, means; `used_bytes`, of keys, values and indices
    at its end, without what is reserved for rows to come.

    `marks`: what was counted before the first step, and up to the end of each stretch. `waiting`: the counts of prompt
    tokens read that lay on the device [notes x layers]. `held_bytes`: with what is reserved."""
    totals = [0.0, *waiting.cumsum(0).tolist()] if waiting is not None else [0.0]
    moved = [mark.moved_bytes + int(mark.moved_on_device or 0) for mark in marks]
    costs: dict[str, list[float]] = {
        "steps": [],
        "attended": [],
        "moved_bytes": [],
        "used_bytes": [],
    }
    for number, (before, after) in enumerate(pairwise(marks)):
        steps = after.steps - before.steps
        prompt = (
            after.prompt_reads
            - before.prompt_reads
            + totals[after.waiting]
            - totals[before.waiting]
        )
        read = prompt / layers + float(after.generated_reads) - float(before.generated_reads)
        values = (
            after.steps,
            read / steps,
            (moved[number + 1] - moved[number]) / steps,
            held_bytes - after.unused_bytes,
        )
        for name, value in zip(costs, values, strict=True):
            costs[name].append(round(value, 2))
    return costs
