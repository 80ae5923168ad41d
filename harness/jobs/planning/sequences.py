"""What one more sequence of a batch takes, by the forecast of a run's bytes (capacity.py): plans divide by it."""

from __future__ import annotations

from typing import NamedTuple

from harness.jobs.planning.capacity import Holder, activations, cases_of, counted, needed
from harness.jobs.planning.items import Item
from harness.models.base import DTYPE_BYTES, ModelInfo


class SequenceBytes(NamedTuple):
    """Bytes of one sequence among many: sealed, on the device and in host memory beside a GPU; `rounding` is what the
    device's allocator gives it beyond that, and pinned memory is counted as it is given. `passing` is taken while its
    prompt is computed, beside what it then holds; `staged` by the rows that a layer brings in a step."""

    device: int
    rounding: int
    host: int
    passing: int
    staged: int


def sequence_bytes(holder: Holder, info: ModelInfo, item: Item, *, layerwise: bool = False) -> SequenceBytes:
    """`layerwise`: the prompt passes through one layer after the other, which seals before the next begins. Raises
    `CostError` where the method declares no cost."""
    settings, cases = holder.settings, cases_of(holder, info, item)
    costs, on_cpu = [holder.method.cost(case) for case in cases], holder.settings.device == "cpu"
    slides = info.kv_bytes(settings.dtype, item.room, slide=True) * (info.num_whole_layers < info.num_layers)
    here = [counted(cost, on_cpu) for cost in costs]
    away = [0 if on_cpu else counted(cost, True) - cost.device_bytes for cost in costs]
    passing = needed(info, holder, [item]).total - info.weight_bytes(settings.dtype) - slides - sum(here)
    return SequenceBytes(
        device=slides + sum(here),
        rounding=0 if on_cpu else sum(map(_in_blocks, here)) - sum(here),
        host=sum(map(_pinned, away)),
        passing=_passing_layers(holder, info, item) if layerwise else passing,
        staged=max(cost.moved_bytes_per_step for cost in costs),
    )


def _passing_layers(holder: Holder, info: ModelInfo, item: Item) -> int:
    """What a prompt takes that goes through the layers one by one: a layer that does not stay as it is, its seal, the
    prompt's hidden states, and those of a chunk within the layer."""
    settings, prompt = holder.settings, len(item.prompt.ids)
    chunk, most, kept, hidden = min(prompt, settings.prefill_chunk or prompt), 0, 0, 0
    for case in cases_of(holder, info, item):
        layer, cost = holder.method.transient(case, chunk), holder.method.cost(case)
        leaves = any(cost.away.values()) or cost.device_bytes < case.dense_bytes
        most = max(most, leaves * case.dense_bytes + max(layer.prefill, layer.seal))
        kept = max(kept, layer.kept)
        hidden = max(hidden, leaves * prompt * info.hidden_size * DTYPE_BYTES[settings.dtype])
    return kept + most + hidden + activations(info, settings, chunk)


def _in_blocks(count: int) -> int:
    """Bytes of keys and values that torch's allocator gives on a GPU: tensors from 10 MiB on in steps of 2 MiB."""
    large, step = 10 << 20, 2 << 20
    return count if count < 2 * large else 2 * -(-count // (2 * step)) * step


def _pinned(count: int) -> int:
    """Bytes that torch gives in pinned host memory: a power of two."""
    return 1 << (count - 1).bit_length() if count else 0
