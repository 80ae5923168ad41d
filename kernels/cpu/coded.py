"""Computes attention over codes, and decodes rows of them, compiled (coded.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.coded import Coded, Codes
from kernels.cpu.ffi.bindings import Function, Struct, anything, elements, floats, int64s, integer, real
from kernels.cpu.ffi.library import load
from kernels.ragged import Ragged, first_of

_DTYPES = (torch.float32, torch.bfloat16)
_LANES = 16
_MOST_CHANNELS, _MOST_RANGES = 256, 16


class CodedAttention(Struct):
    """Describe a call of attention over codes."""

    q = elements("batch * groups * heads * dim")
    out = elements("batch * groups * heads * dim", written=True)
    lse = floats("batch * groups * heads", written=True)
    k = anything(strides="batch group token")  # uint8 [B G S D*bits/8]
    v = anything(strides="batch group token")
    k_range = anything(strides="batch group block")  # fp16 [B G S/block 2*D]
    v_range = anything(strides="batch group token")  # fp16 [B G S 2*ranges]
    k_table = v_table = k_range_table = v_range_table = int64s("batch * 3", optional=True)  # as in decode.py
    counts = int64s("batch", optional=True)  # how many tokens each sequence has; None: `count`
    bits = block = ranges = integer()
    batch = groups = heads = dim = integer()
    count = integer(0)
    scale = real()


class DecodeRows(Struct):
    """Describe a call that decodes rows."""

    k_out = elements("pairs * count * dim", written=True)
    v_out = elements("pairs * count * dim", written=True)
    k = anything(strides="batch group token")
    v = anything(strides="batch group token")
    k_range = anything(strides="batch group block")
    v_range = anything(strides="batch group token")
    k_table = v_table = k_range_table = v_range_table = int64s("pairs // groups * 3", optional=True)
    counts = int64s("pairs // groups", optional=True)  # how many rows each sequence has; None: all that are asked for
    rows = int64s("pairs * count", optional=True)  # None: all, in order
    blocks = int64s("pairs * count")
    bits = integer(0)  # 0: floats of 8 bits, whose scales are `v_range`
    ranges = pairs = groups = count = dim = integer()


_library = load("coded", Function("coded_attention", CodedAttention), Function("decode_rows", DecodeRows))


def coded_attention(q: Tensor, coded: Coded, scale: float) -> tuple[Tensor, Tensor]:
    """Attend from one token to codes, as kernels/coded.py defines it."""
    q = q.contiguous()
    (batch, heads, _, dim), (_, groups, count, _) = q.shape, coded.k.shape
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    _library.coded_attention(
        q=q, out=out, lse=lse, **_places(coded), counts=coded.k.counts if isinstance(coded.k, Ragged) else None,
        bits=coded.bits, block=coded.block, ranges=coded.v_range.shape[3] // 2, batch=batch, groups=groups,
        heads=heads // groups, dim=dim, count=count, scale=scale,
    )  # fmt: skip
    return out, lse


def coded_attention_refuses(q: Tensor, coded: Codes, scale: float) -> str | None:
    if q.dtype not in _DTYPES or q.is_cuda:
        return f"takes float32 and bfloat16 on the CPU, got {q.dtype} on {q.device}"
    return _unfit(coded) if isinstance(coded, Coded) else "takes codes that are integers, got floats of 8 bits"


def decode_rows(coded: Codes, rows: Tensor | None, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Decode tokens of each KV head, as kernels/coded.py defines it."""
    (batch, groups, count), dim, (ranges, bits, _) = blocks.shape, coded.dim, coded.kind
    k, v = (torch.empty((batch, groups, count, dim), dtype=dtype) for _ in range(2))
    counts = coded.k.counts if rows is None and isinstance(coded.k, Ragged) else None
    rows = None if rows is None else rows.long().contiguous()
    if k.numel():
        _library.decode_rows(
            k_out=k, v_out=v, **_places(coded), counts=counts, rows=rows, blocks=blocks.long().contiguous(),
            bits=bits, ranges=ranges, pairs=batch * groups, groups=groups, count=count,
            dim=dim,
        )  # fmt: skip
    return k, v


def decode_rows_refuses(coded: Codes, rows: Tensor | None, blocks: Tensor, dtype: torch.dtype) -> str | None:
    if dtype not in _DTYPES or coded.k.device.type != "cpu":
        return f"makes float32 and bfloat16 on the CPU, got {dtype} on {coded.k.device}"
    return _unfit(coded) if isinstance(coded, Coded) else None


def _places(coded: Codes) -> dict[str, Tensor | None]:
    """Return the tensors of codes and, of several sequences, the tables of where each of them
    lies."""
    tensors: dict[str, Tensor] = dict(zip(("k", "v", "k_range", "v_range"), coded.all_four, strict=True))
    tables = {f"{name}_table": x.table if isinstance(x, Ragged) else None for name, x in tensors.items()}
    return {name: first_of(x) for name, x in tensors.items()} | tables


def _unfit(coded: Coded) -> str | None:
    """Return why a row's codes cannot be read sixteen at a time, or None."""
    width, ranges = coded.k.shape[3], coded.v_range.shape[3] // 2
    if width % _LANES or coded.dim % ranges or coded.dim // ranges % _LANES:
        return f"takes rows and groups of a multiple of {_LANES} codes, got {width} bytes and {ranges} groups of a row"
    if coded.dim > _MOST_CHANNELS or ranges > _MOST_RANGES:
        return f"takes up to {_MOST_CHANNELS} channels in {_MOST_RANGES} groups, got {coded.dim} in {ranges}"
    return None
