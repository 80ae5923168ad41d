"""Scores of an index, compiled: scores.cpp."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from struct import pack

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.cpu.library import load

_library = load("scores")
_library.row_scores.argtypes = [c_int, *[c_void_p] * 3]
_library.channel_scores.argtypes = [c_int, *[c_void_p] * 4, *[c_int64] * 8]
_library.pq_scores.argtypes = [c_int, c_int, *[c_void_p] * 4, *[c_int64] * 6]

_LINES = (1, 2, 3, 4, 6, 8, 16)  # row sizes it was built for, in cache lines
_BYTES = {torch.float32: 4, torch.bfloat16: 2}


def row_scores(q: Tensor, x: Tensor) -> Tensor:
    """As in kernels/reference.py."""
    batch, groups, heads, width = q.shape
    count, size = x.shape[2], x.element_size()
    out = q.new_empty((batch, groups, heads, count), dtype=torch.float32)
    q = q.contiguous() if width * size % 64 == 0 else pad(q, (0, -width % (64 // size)))
    numbers = (x.data_ptr(), batch, groups, heads, count, width * size, *(size * stride for stride in x.stride()[:3]))
    if count:
        _library.row_scores(size == 2, q.data_ptr(), pack("9q", *numbers), out.data_ptr())
    return out


def row_scores_refuses(q: Tensor, x: Tensor) -> str | None:
    if -(-q.shape[3] * _BYTES.get(q.dtype, 1) // 64) not in _LINES:
        return f"is not built for rows of {q.shape[3]} x {q.dtype}"
    return _unfit(q, x) or ("needs the channels of a row side by side" if x.stride(3) != 1 else None)


def channel_scores(q: Tensor, x: Tensor, channels: Tensor) -> Tensor:
    batch, groups, heads, width = q.shape
    count = x.shape[3]
    out = q.new_empty((batch, groups, heads, count), dtype=torch.float32)
    q, channels = q.float().contiguous(), channels.long().contiguous()
    _library.channel_scores(
        x.element_size() == 2, q.data_ptr(), x.data_ptr(), channels.data_ptr(), out.data_ptr(),
        batch, groups, heads, count, width, *x.stride()[:3],
    )  # fmt: skip
    return out


def channel_scores_refuses(q: Tensor, x: Tensor, channels: Tensor) -> str | None:
    if q.dtype not in _BYTES:
        return f"takes float32 and bfloat16, got q {q.dtype}"
    return _unfit(x, x) or ("needs the tokens of a channel side by side" if x.stride(3) != 1 else None)


def pq_scores(q: Tensor, centroids: Tensor, codes: Tensor) -> Tensor:
    batch, groups, parts, clusters, width = centroids.shape
    heads, count = q.shape[1] // groups, codes.shape[2]
    out = q.new_empty((batch, groups, heads, count), dtype=torch.float32)
    q, centroids, codes = q.contiguous(), centroids.contiguous(), codes.contiguous()
    _library.pq_scores(
        q.element_size() == 2, codes.element_size(), q.data_ptr(), centroids.data_ptr(), codes.data_ptr(),
        out.data_ptr(), batch * groups, heads, parts, clusters, width, count,
    )  # fmt: skip
    return out


def pq_scores_refuses(q: Tensor, centroids: Tensor, codes: Tensor) -> str | None:
    if codes.dtype not in (torch.uint8, torch.int32):
        return f"takes codes of uint8 or int32, got {codes.dtype}"
    if q.shape[1] > 16 * centroids.shape[1]:
        return f"takes up to 16 query heads per KV head, got {q.shape[1] // centroids.shape[1]}"
    return _unfit(q, centroids)


def _unfit(q: Tensor, x: Tensor) -> str | None:
    if q.dtype not in _BYTES or q.is_cuda:
        return f"takes float32 and bfloat16 on the CPU, got {q.dtype} on {q.device}"
    return None if x.dtype == q.dtype else f"takes one dtype, got {q.dtype} and {x.dtype}"
