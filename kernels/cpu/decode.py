"""Decode attention, compiled: decode.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from struct import pack

import torch
from torch import Tensor

from kernels.cpu.library import load
from kernels.reference import Segment

_library = load("decode")
_library.segment_attention.argtypes = [c_int, *[c_void_p] * 4, *[c_int64] * 5, c_float]

_LINES = (1, 2, 3, 4, 6, 8)  # head sizes it was built for, in cache lines
_BYTES = {torch.float32: 4, torch.bfloat16: 2}


def segment_attention(q: Tensor, segments: Sequence[Segment], scale: float) -> Tensor:
    """As in kernels/reference.py; neither rows nor heads are copied."""
    return _attend(q, segments, scale, None)


def segment_attention_with_lse_refuses(q: Tensor, segments: Sequence[Segment], scale: float) -> str | None:
    return segment_attention_refuses(q, segments, scale)


def segment_attention_refuses(q: Tensor, segments: Sequence[Segment], scale: float) -> str | None:
    size = _BYTES.get(q.dtype)
    if size is None or q.is_cuda:
        return f"takes float32 and bfloat16 on the CPU, got {q.dtype} on {q.device}"
    if (q.shape[3] * size) % 64 or q.shape[3] * size // 64 not in _LINES:
        return f"is not built for heads of {q.shape[3]} x {q.dtype}"
    for k, v, _, live in segments:
        if live is not None:
            return "reads as many tokens as there are rows, not a count on the device"
        if k.dtype != q.dtype or v.dtype != q.dtype:
            return f"takes one dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}"
        if k.stride(3) != 1 or v.stride(3) != 1:
            return "needs the channels of a row side by side"
    return None


def segment_attention_with_lse(q: Tensor, segments: Sequence[Segment], scale: float) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return _attend(q, segments, scale, lse), lse


def _attend(q: Tensor, segments: Sequence[Segment], scale: float, lse: Tensor | None) -> Tensor:
    batch, heads, _, dim = q.shape
    size = _BYTES[q.dtype]
    groups = max((k if rows is None else rows).shape[1] for k, _, rows, _ in segments)
    numbers: list[int] = []
    kept = []  # alive until the call is over
    for k, v, rows, _ in segments:
        count, address, rows_share = k.shape[2], 0, 1
        if rows is not None:
            rows = rows.long().contiguous()
            kept.append(rows)
            count, address, rows_share = rows.shape[2], rows.data_ptr(), groups // rows.shape[1]
        (kb, kg, kt, _), (vb, vg, vt, _) = k.stride(), v.stride()
        numbers += (k.data_ptr(), v.data_ptr(), address, count)
        numbers += (size * kb, size * kg, size * kt, size * vb, size * vg, size * vt)
        numbers += (groups // k.shape[1], rows_share)
    q = q.contiguous()
    out = torch.empty_like(q)
    _library.segment_attention(
        size == 2, q.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(),
        pack(f"{len(numbers)}q", *numbers), len(segments), batch, groups, heads // groups, dim, scale,
    )  # fmt: skip
    return out
