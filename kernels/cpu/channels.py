"""Sums scores over a few channels of the keys, compiled (channels.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu.ffi.bindings import Function, Struct, elements, floats, int64s, integer
from kernels.cpu.ffi.library import load
from kernels.ragged import Ragged


class ChannelSums(Struct):
    """Describe a call for sums or scores: queries `q` in `num_channels` chosen channels of the keys
    `x`."""

    q = floats("batch * groups * heads * num_channels")
    x = elements(strides="batch group channel")  # [B G D S]
    table = int64s("batch * 3", optional=True)  # of `Ragged`, instead of the address and the strides above
    counts = int64s("batch", optional=True)  # of each sequence, instead of `count`
    channels = int64s("batch * groups * num_channels")
    out = floats("batch * groups * count", written=True, optional=True)
    lse = floats("batch * groups * heads", written=True, optional=True)
    scores = floats("batch * groups * heads * count", written=True, optional=True)  # instead of the two
    batch = groups = heads = count = num_channels = integer()


_library = load("channels", Function("channel_sums", ChannelSums), Function("channel_scores", ChannelSums))

_MOST_HEADS = 16


def channel_sums(q: Tensor, x: Tensor | Ragged, channels: Tensor) -> tuple[Tensor | Ragged, Tensor]:
    """Sum the scores of a few channels over the group, as kernels/reference.py defines it."""
    out = q.new_empty((*q.shape[:2], x.shape[3]), dtype=torch.float32)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    _run(_library.channel_sums, q, x, channels, out=out, lse=lse, scores=None)
    return Ragged.filled_up(out, x.sizes) if isinstance(x, Ragged) else out, lse


def channel_scores(q: Tensor, x: Tensor | Ragged, channels: Tensor) -> Tensor | Ragged:
    """Multiply in a few channels, as kernels/reference.py defines it."""
    scores = q.new_empty((*q.shape[:3], x.shape[3]), dtype=torch.float32)
    _run(_library.channel_scores, q, x, channels, out=None, lse=None, scores=scores)
    return Ragged.filled_up(scores, x.sizes, 3) if isinstance(x, Ragged) else scores


def channel_scores_refuses(q: Tensor, x: Tensor | Ragged, channels: Tensor) -> str | None:
    return channel_sums_refuses(q, x, channels)


def _run(run: Callable[..., None], q: Tensor, x: Tensor | Ragged, channels: Tensor, **written: Tensor | None) -> None:
    first, table, counts = (x.first, x.table, x.counts) if isinstance(x, Ragged) else (x, None, None)
    batch, groups, heads, num_channels = q.shape
    run(
        q=q.float().contiguous(), x=first, table=table, counts=counts, channels=channels.long().contiguous(),
        batch=batch, groups=groups, heads=heads, count=x.shape[3], num_channels=num_channels, **written,
    )  # fmt: skip


def channel_sums_refuses(q: Tensor, x: Tensor | Ragged, channels: Tensor) -> str | None:
    if isinstance(x, Ragged):
        x = x.first
    if x.is_cuda or x.dtype not in (torch.float32, torch.bfloat16):
        return f"takes keys of float32 or bfloat16 on the CPU, got {x.dtype} on {x.device}"
    if q.is_cuda or q.dtype not in (torch.float32, torch.bfloat16):
        return f"takes queries of float32 or bfloat16 on the CPU, got {q.dtype} on {q.device}"
    if q.shape[2] > _MOST_HEADS:
        return f"takes up to {_MOST_HEADS} query heads per KV head, got {q.shape[2]}"
    return "needs the tokens of a channel side by side" if x.stride(3) != 1 else None
