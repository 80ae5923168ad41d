"""Computes attention over codes, and decodes rows of them, compiled (coded.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import nvfp4
from kernels.coded import (
    Coded,
    CodedFloats,
    Codes,
    Rotated,
    decoded_tokens,
    under_one_softmax,
    with_recent,
)
from kernels.cpu.ffi.bindings import (
    FieldGroup,
    Function,
    Struct,
    anything,
    elements,
    floats,
    int64s,
    integer,
    real,
)
from kernels.cpu.ffi.library import load
from kernels.cpu.widths import MOST_LINES, WIDTHS, width_of
from kernels.levels import CodedLevels, level_table, normal_matrix
from kernels.nvfp4 import CodedFloats4
from kernels.ragged import Ragged, counts_of, first_of, table_of
from kernels.reference import Segment

CODES = FieldGroup(
    "Codes",
    {
        "k": anything(strides="batch group token"),  # uint8 [B G S bytes]
        "v": anything(strides="batch group token"),
        # fp16: of integers a range for each channel of a block, else the scales of each token; of
        # floats of 4 bits the scales of a block in fp32, and those of a token in 8 bits
        "k_range": anything(strides="batch group block"),
        "v_range": anything(strides="batch group token"),
        # channels of keys that are kept in full, and which they are in a block
        "kept": elements(strides="batch group token", optional=True),
        "which": anything(strides="batch group block", optional=True),
        # [B 3] of `Ragged`, instead of the address and the strides above
        "k_table": int64s(optional=True),
        "v_table": int64s(optional=True),
        "k_range_table": int64s(optional=True),
        "v_range_table": int64s(optional=True),
        "kept_table": int64s(optional=True),
        "which_table": int64s(optional=True),
        "levels": floats(optional=True),  # what the codes of values stand for; None: themselves
        "key_levels": floats(optional=True),
        "residual": real(),  # times the third scale of a row: the size of what a sign stands for
        "kind": integer(0),  # 0: integers, 1: floats, 2: levels, 3: floats of 4 bits
        "key_bits": integer(),
        "bits": integer(),  # of a value's code
        "block": integer(),  # tokens that share a range of keys
        # of a value, or scales of a key and of a value each; of other formats, the scales of a row
        "ranges": integer(),
        "dim": integer(),
        "channels": integer(0),  # of a key that are kept in full
    },
)


class CodedAttention(Struct):
    """Describe a call of attention over codes."""

    q = elements("batch * groups * heads * width")  # width: a head's channels, filled up with zeros
    q_signs = elements("batch * groups * heads * width", optional=True)  # the query of keys' signs
    out = elements("batch * groups * heads * codes_dim", written=True)
    lse = floats("batch * groups * heads", written=True)
    codes = CODES
    counts = int64s("batch", optional=True)  # how many tokens each sequence has; None: `count`
    batch = groups = heads = width = integer()
    count = integer(0)
    scale = real()


class DecodeRows(Struct):
    """Describe a call that decodes rows."""

    k_out = elements("pairs * count * codes_dim", written=True)
    v_out = elements("pairs * count * codes_dim", written=True)
    codes = CODES
    counts = int64s("pairs // groups", optional=True)  # how many rows each sequence has
    rows = int64s("pairs * count", optional=True)  # None: all, in order
    blocks = int64s("pairs * count", optional=True)  # None: each row stands in its block
    pairs = groups = count = integer()


_library = load(
    "coded",
    Function("coded_attention", CodedAttention),
    Function("decode_rows", DecodeRows),
    Function("is_on_tiles", returns="int64_t"),
)

_MOST_CHANNELS, _MOST_RANGES = 256, 16


def coded_attention(
    q: Tensor, segments: Sequence[Segment | Codes | Rotated], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend from one token per sequence to coded and other segments, as kernels/coded.py defines
    it: q [B H 1 D] -> [B H 1 D], log-sum-exp [B H]"""
    return under_one_softmax(q, segments, scale, _attended)


def _attended(q: Tensor, coded: Codes, scale: float) -> tuple[Tensor, Tensor]:
    (batch, heads, _, dim), (_, groups, count, _) = q.shape, coded.k.shape
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    more = width_of(dim, q.dtype) - dim
    signs = None
    if isinstance(coded, CodedLevels) and coded.seed is not None:
        # (signs @ matrix) . q = signs . (matrix @ q)
        turned = q.float() @ normal_matrix(dim, coded.seed, q.device).T
        signs = pad(turned.to(q.dtype), (0, more))
    _library.coded_attention(
        q=pad(q, (0, more)).contiguous(), q_signs=signs, out=out, lse=lse, **_described(coded),
        counts=counts_of(coded.k, coded.k.device),
        batch=batch, groups=groups, heads=heads // groups, width=dim + more, count=count, scale=scale,
    )  # fmt: skip
    return out, lse


def coded_attention_refuses(q, segments, scale):
    if q.dtype not in WIDTHS or q.is_cuda:
        return f"takes float32 and bfloat16 on the CPU, got {q.dtype} on {q.device}"
    if q.shape[3] > MOST_LINES * WIDTHS[q.dtype]:
        return f"is not built for heads of {q.shape[3]} x {q.dtype}"
    of_codes = (each.tokens if isinstance(each, Rotated) else each for each in segments)
    reasons = (_unfit(coded, q.dtype) for coded in of_codes if not isinstance(coded, Segment))
    return next((reason for reason in reasons if reason), None)


def decode_rows(
    coded: Codes,
    rows: Tensor | None,
    blocks: Tensor | None,
    dtype: torch.dtype,
    recent: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn codes of the tokens `rows` (None: all) back into keys and values [B G K D], as
    kernels/coded.py defines it."""
    listed = [None if x is None else x.long().contiguous() for x in (rows, blocks)]
    (batch, groups, *_), counts = (
        coded.k.shape,
        None if rows is not None else counts_of(coded.k, coded.k.device),
    )
    count = decoded_tokens(coded, rows if blocks is None else blocks, recent)
    k, v = (torch.empty((batch, groups, count, coded.dim), dtype=dtype) for _ in range(2))
    if count:
        _library.decode_rows(
            k_out=k, v_out=v, **_described(coded), counts=counts,
            rows=listed[0], blocks=listed[1], pairs=batch * groups, groups=groups, count=count,
        )  # fmt: skip
    return k, v if recent is None else with_recent(v, *recent)


def decode_rows_refuses(coded, rows, blocks, dtype, recent=None):
    if dtype not in WIDTHS or coded.k.device.type != "cpu":
        return f"makes float32 and bfloat16 on the CPU, got {dtype} on {coded.k.device}"
    if isinstance(coded, CodedLevels) and coded.seed is not None:
        return "does not turn signs back into numbers"
    return _unfit(coded, dtype)


def _described(coded: Codes) -> dict[str, Any]:
    """Return the arguments of a call that describe `coded`: the fields of the struct `CODES`."""
    levels: tuple[Tensor | None, ...] = None, None
    tensors: list[Tensor | None] = [*coded.all_four, None, None]
    if isinstance(coded, Coded):
        kind, (ranges, key_bits, bits, _) = 0, coded.kind
        tensors[4:] = coded.kept, coded.which
    elif isinstance(coded, CodedFloats):
        kind, ranges, key_bits, bits = 1, 2, 8, 8
    elif isinstance(coded, CodedFloats4):
        kind, (ranges, key_bits, bits, _) = 3, coded.kind
        levels = (nvfp4.level_table(torch.device("cpu")),) * 2
    else:
        kind, ranges, (_, key_bits, bits, _) = 2, coded.norms.shape[3], coded.kind
        levels = tuple(level_table(coded.dim, x, torch.device("cpu")) for x in (bits, key_bits))
    described: dict[str, Any] = {
        "codes_levels": levels[0],
        "codes_key_levels": levels[1],
        "codes_residual": sqrt(pi / 2) / coded.dim,
        "codes_kind": kind,
        "codes_key_bits": key_bits,
        "codes_bits": bits,
        "codes_block": coded.block,
        "codes_ranges": ranges,
        "codes_dim": coded.dim,
        "codes_channels": 0 if tensors[4] is None else tensors[4].shape[3],
    }
    names = "k", "v", "k_range", "v_range", "kept", "which"
    for name, x in zip(names, tensors, strict=True):
        described[f"codes_{name}"] = None if x is None else first_of(x)
        described[f"codes_{name}_table"] = None if x is None else table_of(x)
    return described


def _unfit(coded: Codes, dtype: torch.dtype) -> str | None:
    """Return why the codes of a row cannot be read sixteen at a time, for numbers of `dtype`, or
    None."""
    dim, ranges = coded.dim, coded.kind[0] if isinstance(coded, Coded) else 1
    if dim > _MOST_CHANNELS or ranges > _MOST_RANGES:
        return f"takes {_MOST_CHANNELS} channels in {_MOST_RANGES} ranges, got {dim} in {ranges}"
    if dim % ranges or dim // ranges % 16:
        return f"takes ranges of a multiple of 16 channels, got {ranges} for {dim} channels"
    tensors = (first_of(x) for x in coded if isinstance(x, Tensor | Ragged))
    if any(x.stride(3) != 1 for x in tensors):
        return "needs the codes of a row side by side"
    if isinstance(coded, Coded) and coded.kept is not None and coded.kept.dtype != dtype:
        return f"takes kept channels of {dtype}, got {coded.kept.dtype}"
    return None
