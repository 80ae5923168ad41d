"""Scores from a few channels of the keys, compiled: channels.cpp."""

from __future__ import annotations

from ctypes import c_void_p
from struct import pack

import torch
from torch import Tensor

from kernels.cpu.library import load

_library = load("channels")
_library.channel_scores.argtypes = [c_void_p]
_library.channel_sums.argtypes = [c_void_p]

_MOST_HEADS = 16


def channel_scores(q: Tensor, x: Tensor, channels: Tensor) -> Tensor:
    """As in kernels/reference.py."""
    out = q.new_empty((*q.shape[:3], x.shape[3]), dtype=torch.float32)
    q, channels = q.float().contiguous(), channels.long().contiguous()
    _library.channel_scores(_numbers(q, x, channels, out, None))
    return out


def channel_scores_refuses(q: Tensor, x: Tensor, channels: Tensor) -> str | None:
    if x.is_cuda or x.dtype not in (torch.float32, torch.bfloat16):
        return f"takes keys of float32 or bfloat16 on the CPU, got {x.dtype} on {x.device}"
    if q.dtype not in (torch.float32, torch.bfloat16):
        return f"takes queries of float32 or bfloat16, got {q.dtype}"
    if q.shape[2] > _MOST_HEADS:
        return f"takes up to {_MOST_HEADS} query heads per KV head, got {q.shape[2]}"
    return "needs the tokens of a channel side by side" if x.stride(3) != 1 else None


def channel_sums(q: Tensor, x: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:2], x.shape[3]), dtype=torch.float32)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    q, channels = q.float().contiguous(), channels.long().contiguous()
    _library.channel_sums(_numbers(q, x, channels, out, lse))
    return out, lse


def channel_sums_refuses(q: Tensor, x: Tensor, channels: Tensor) -> str | None:
    return channel_scores_refuses(q, x, channels)


def _numbers(q: Tensor, x: Tensor, channels: Tensor, out: Tensor, lse: Tensor | None) -> bytes:
    addresses = [0 if part is None else part.data_ptr() for part in (q, x, channels, out, lse)]
    batch, groups, heads, width = q.shape
    return pack("14q", *addresses, x.element_size() == 2, batch, groups, heads, x.shape[3], width, *x.stride()[:3])
