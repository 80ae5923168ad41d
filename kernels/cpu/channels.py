"""Multiplies queries and keys in a few channels, compiled (channels.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import ops
from kernels.cpu.ffi.bindings import Function, Struct, elements, floats, int64s, integer
from kernels.cpu.ffi.library import load
from kernels.ragged import Ragged, filled, first_of, parts_of, with_sizes


class ChannelProducts(Struct):
    """Describe a call of the compiled function that multiplies queries and keys in chosen
    channels. It writes `sums` and `lse`, or only `scores`."""

    q = floats("batch * groups * heads * num_channels")
    x = elements(strides="batch group channel")  # [B G D S]
    # of `Ragged`, instead of the address and the strides above
    table = int64s("batch * 3", optional=True)
    counts = int64s("batch", optional=True)  # of each sequence, instead of `count`
    channels = int64s("batch * groups * num_channels")
    sums = floats("batch * groups * count", optional=True, written=True)
    lse = floats("batch * groups * heads * parts", optional=True, written=True)
    scores = floats("batch * groups * heads * count", optional=True, written=True)
    batch = groups = heads = count = num_channels = parts = part_size = integer()


_library = load("channels", Function("channel_products", ChannelProducts))

_PART = 4096  # tokens of a task
_MOST_HEADS = 16


def channel_sums(q: Tensor, x: Tensor | Ragged, channels: Tensor) -> tuple[Tensor | Ragged, Tensor]:
    """Sum the products in the chosen channels over the heads of each group, and return their
    log-sum-exps, as kernels/reference.py defines it."""
    parts = -(-x.shape[3] // _PART)
    sums = q.new_empty((*q.shape[:2], x.shape[3]), dtype=torch.float32)
    lse = q.new_empty((*q.shape[:3], parts), dtype=torch.float32)
    _run(q, x, channels, parts, sums=sums, lse=lse, scores=None)
    return with_sizes(sums, x), lse


def channel_sums_refuses(q, x, *_):
    first = first_of(x)
    if q.is_cuda or first.is_cuda or first.dtype not in (torch.float32, torch.bfloat16):
        return f"takes keys of float32 or bfloat16 on the CPU, got {first.dtype} on {first.device}"
    if q.shape[2] > _MOST_HEADS:
        return f"takes up to {_MOST_HEADS} query heads per KV head, got {q.shape[2]}"
    if not x.shape[3]:
        return "takes at least one token"
    return "needs the tokens of a channel side by side" if first.stride(3) != 1 else None


def channel_weights(
    q: Tensor, x: Tensor | Ragged, channels: Tensor, scale: float, reduce: str, times: int
) -> Tensor | Ragged:
    """Turn the products in the chosen channels into weights, as kernels/reference.py defines it."""
    scores = q.new_empty((*q.shape[:3], x.shape[3]), dtype=torch.float32)
    _run(q, x, channels, -(-x.shape[3] // _PART), sums=None, lse=None, scores=scores)
    weights = ops.group_weights(with_sizes(scores, x, 3), scale, reduce)
    repeated = filled(weights).repeat_interleave(times, -1)
    return with_sizes(repeated, x.sizes * times if isinstance(x, Ragged) else None)


channel_weights_refuses = channel_sums_refuses


def _run(
    q: Tensor, x: Tensor | Ragged, channels: Tensor, parts: int, **written: Tensor | None
) -> None:
    batch, groups, heads, num_channels = q.shape
    first, table, counts = parts_of(x, q.device)
    _library.channel_products(
        q=q.to(x.dtype).float().contiguous(), x=first, table=table, counts=counts,
        channels=channels.long().contiguous(), batch=batch, groups=groups, heads=heads, count=x.shape[3],
        num_channels=num_channels, parts=parts, part_size=_PART, **written,
    )  # fmt: skip
