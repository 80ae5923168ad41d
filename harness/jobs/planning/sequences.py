"""What one more sequence of a batch takes, by the forecast of a run's bytes (capacity.py): plans divide by it."""

from __future__ import annotations

from typing import NamedTuple

from harness.jobs.planning.cache_bytes import Holder, Staging, cases, counted, host_bytes
from harness.jobs.planning.capacity import needed
from harness.jobs.planning.items import Item
from harness.models.base import ModelInfo


class SequenceBytes(NamedTuple):
    """Bytes of one sequence among many: sealed, on the device and in host memory beside a GPU; `rounding` is what the
    device's allocator gives it beyond that, and `host` is pinned before the prompt. `passing` is taken while its
    prompt is computed, or in a step by the rows that a layer brings, beside what it then holds; `arriving` by those
    that come while other layers compute."""

    device: int
    rounding: int
    host: int
    passing: int
    arriving: int


def sequence_bytes(holder: Holder, info: ModelInfo, item: Item, rounded: bool = True) -> SequenceBytes:
    """Without `rounded`, no allocator gives more than it is asked for. Raises `CostError` where the method declares no
    cost."""
    settings, listed = holder.settings, cases(holder, info, item)
    costs, on_cpu = [holder.method.cost(case) for case in listed], holder.settings.device == "cpu"
    slides = info.kv_bytes(settings.dtype, item.room, slide=True) * (info.num_whole_layers < info.num_layers)
    here = [counted(cost, on_cpu) for cost in costs]
    arriving = Staging.of(holder, zip(listed, costs, strict=True)).arriving
    passing = needed(info, holder, [item]).total - info.weight_bytes(settings.dtype) - slides - sum(here) - arriving
    return SequenceBytes(
        device=slides + sum(here),
        rounding=sum(map(_in_blocks, here)) - sum(here) if rounded and not on_cpu else 0,
        host=0 if on_cpu else host_bytes(holder, info, item),
        passing=max(0, passing),  # where rows leave while the prompt is computed, it never holds what a sealed one does
        arriving=arriving,
    )


def _in_blocks(count: int) -> int:
    """Bytes of keys and values that torch's allocator gives on a GPU: tensors from 10 MiB on in steps of 2 MiB."""
    large, step = 10 << 20, 2 << 20
    return count if count < 2 * large else 2 * -(-count // (2 * step)) * step
