"""Computes decode attention, compiled (decode.cpp)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.ffi import bindings
from kernels.cpu.ffi.bindings import Function, elements, floats, int64s, integer, real
from kernels.cpu.ffi.library import load
from kernels.ragged import Ragged
from kernels.reference import NARROW, Segment


class PackedSegment(bindings.Struct):
    """Describe the keys and values of one segment (kernels/reference.py), as the compiled attention
    reads them."""

    k = elements(strides="batch group token")
    v = elements(strides="batch group token")
    rows = int64s(optional=True)  # None: all rows
    # [B 3] of `Ragged`, instead of the address and the strides above
    k_table = v_table = int64s(optional=True)
    live = int64s(optional=True)  # [B], how many rows are there; None: `count`
    log_weights = floats(optional=True)  # [B lists count]; None: 0 everywhere
    count = integer()
    # how many neighbouring groups share their keys, and their rows
    k_share = rows_share = integer()


class SegmentAttention(bindings.Struct):
    """Describe a call of the compiled attention from one token per sequence to segments; these are
    packed before it, one after the other."""

    q = elements("batch * groups * heads * dim")
    out = elements("batch * groups * heads * dim", written=True)
    lse = floats("batch * groups * heads", written=True, optional=True)
    num_segments = batch = integer()
    groups = heads = dim = integer()  # groups: each reads one choice of rows; heads: of a group
    scale = real()


_library = load("decode", Function("segment_attention", PackedSegment, SegmentAttention))

_LINES = (1, 2, 3, 4, 6, 8)  # head sizes that the library is built for, in cache lines
_BYTES = {torch.float32: 4, torch.bfloat16: 2}


def segment_attention(q: Tensor, segments: Sequence[Segment], scale: float) -> Tensor:
    """Attend from one token per sequence to all tokens of the segments under one softmax, q
    [B H 1 D] -> [B H 1 D], as kernels/reference.py defines it. Neither rows nor heads are
    copied."""
    return _attend(q, segments, scale, None)


def segment_attention_refuses(q, segments, scale):
    size = _BYTES.get(q.dtype)
    if size is None or q.is_cuda:
        return f"takes float32 and bfloat16 on the CPU, got {q.dtype} on {q.device}"
    width = q.shape[3] * size
    if width % 64 or width // 64 not in _LINES:
        return f"is not built for heads of {q.shape[3]} x {q.dtype}"
    for segment in segments:
        k, v = segment.k, segment.v
        if v.shape[3] != k.shape[3]:
            return NARROW.format(v.shape[3], k.shape[3])
        if k.dtype != q.dtype or v.dtype != q.dtype:
            return f"takes one dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}"
        if k.stride(3) != 1 or v.stride(3) != 1:
            return "needs the channels of a row side by side"
        if reason := segment.unfit_weights():
            return reason
    return None


def segment_attention_with_lse(
    q: Tensor, segments: Sequence[Segment], scale: float
) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return _attend(q, segments, scale, lse), lse


segment_attention_with_lse_refuses = segment_attention_refuses


def _attend(q: Tensor, segments: Sequence[Segment], scale: float, lse: Tensor | None) -> Tensor:
    batch, heads, _, dim = q.shape
    sizes = [segment.lists for segment in segments]
    groups = max(sizes)[0]
    packed, kept = [], []  # kept: tensors that must live until the call is over
    for segment, (lists, count) in zip(segments, sizes, strict=True):
        k, v, rows, live, _ = segment
        listed = k if rows is None else rows
        if not count:
            continue
        if live is not None:
            live = live.expand(batch).contiguous()
        elif isinstance(listed, Ragged):
            live = listed.counts
        if rows is not None:
            rows = (rows.whole if isinstance(rows, Ragged) else rows).long().contiguous()
        log_weights = segment.weights_of(count)
        kept += [rows, live, log_weights]
        k_table, v_table = None, None
        k_share, rows_share = groups // k.shape[1], groups // lists
        if isinstance(k, Ragged):
            k, k_table = k.first, k.table
        if isinstance(v, Ragged):
            v, v_table = v.first, v.table
        described = PackedSegment.pack(
            k=k, v=v, rows=rows, k_table=k_table, v_table=v_table, live=live, log_weights=log_weights, count=count,
            k_share=k_share, rows_share=rows_share,
        )  # fmt: skip
        packed.append(described)
    if not packed:
        if lse is not None:
            lse.fill_(float("-inf"))
        return torch.zeros_like(q)
    q = q.contiguous()
    out = torch.empty_like(q)
    _library.segment_attention(
        b"".join(packed), q=q, out=out, lse=lse, num_segments=len(packed), batch=batch, groups=groups,
        heads=heads // groups, dim=dim, scale=scale,
    )  # fmt: skip
    return out
