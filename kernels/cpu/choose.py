"""Softmax over candidates and the choice among them, compiled: choose.cpp."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from kernels.cpu.library import load

_library = load("choose")
_library.group_weights.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_float, c_int]
_library.group_margins.argtypes = [*[c_void_p] * 3, *[c_int64] * 4, c_float]
_library.log_sum_exp.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_float]
_library.top_k.argtypes = [c_void_p, c_void_p, *[c_int64] * 4]


def group_weights(logits: Tensor, scale: float, reduce: str) -> Tensor:
    """As in kernels/reference.py."""
    batch, groups, heads, count = logits.shape
    out = logits.new_empty((batch, groups, count))
    logits = logits.contiguous()
    _library.group_weights(logits.data_ptr(), out.data_ptr(), batch * groups, heads, count, scale, reduce == "largest")
    return out


def group_weights_refuses(logits: Tensor, scale: float, reduce: str) -> str | None:
    return _unfit(logits)


def group_margins(logits: Tensor, candidates: int, reach: float) -> tuple[Tensor, Tensor]:
    batch, groups, heads, count = logits.shape
    out, counts = logits.new_empty((batch, groups, candidates)), logits.new_empty((batch, groups), dtype=torch.int64)
    logits, pairs = logits.contiguous(), batch * groups
    addresses = (x.data_ptr() for x in (logits, out, counts))
    _library.group_margins(*addresses, pairs, heads, count, candidates, reach)
    return out, counts


def group_margins_refuses(logits: Tensor, candidates: int, reach: float) -> str | None:
    return _unfit(logits)


def log_sum_exp(logits: Tensor, scale: float) -> Tensor:
    out = logits.new_empty(logits.shape[:-1])
    logits = logits.contiguous()
    _library.log_sum_exp(logits.data_ptr(), out.data_ptr(), out.numel(), logits.shape[-1], scale)
    return out


def log_sum_exp_refuses(logits: Tensor, scale: float) -> str | None:
    return _unfit(logits)


def top_k(scores: Tensor, count: int) -> Tensor:
    size = scores.shape[-1]
    if scores.stride(-1) != 1 or scores.dim() > 3 or not _evenly_spaced(scores):
        scores = scores.contiguous()
    out = torch.empty((*scores.shape[:-1], count), dtype=torch.int64)
    rows = scores.numel() // size if size else 0
    stride = scores.stride(-2) if scores.dim() > 1 else size
    if count:
        _library.top_k(scores.data_ptr(), out.data_ptr(), rows, size, stride, count)
    return out


def top_k_refuses(scores: Tensor, count: int) -> str | None:
    return _unfit(scores) or (None if count <= scores.shape[-1] else "leaves the error for too large a count to torch")


def _evenly_spaced(x: Tensor) -> bool:
    """Whether all rows [... S] lie at multiples of one stride."""
    return x.dim() < 3 or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _unfit(x: Tensor) -> str | None:
    return (
        None if x.dtype == torch.float32 and not x.is_cuda else f"takes float32 on the CPU, got {x.dtype} on {x.device}"
    )
