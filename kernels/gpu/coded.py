"""Computes attention over codes, and decodes rows of them.

A tile of tokens lies in one block, so that its keys share one range, which is loaded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.coded import Coded, CodedFloats, Codes
from kernels.gpu.common import (
    DTYPES,
    head_rows,
    located,
    padded,
    product,
    split,
    stages,
    unfit,
    unfit_floats,
    unfit_heads,
    unfit_shape,
    unfit_sharing,
)
from kernels.gpu.decode import merged
from kernels.ragged import Ragged, first_of

_MOST, _LEAST = 32, 16  # tokens of a tile
_TILE = 2048  # numbers that a program decodes


def coded_attention(q: Tensor, coded: Codes, scale: float) -> tuple[Tensor, Tensor]:
    """Attend from one token per sequence to coded keys and values, as kernels/coded.py defines it:
    q [B H 1 D] -> [B H 1 D], log-sum-exp [B H]. Tokens are cut into pieces and merged as in
    decode.py."""
    (batch, heads, _, dim), (_, groups, count, _) = q.shape, coded.k.shape
    q, block = q.contiguous(), _tokens_of_a_tile(coded)
    pieces, length = split(max(count, 1), batch * groups, block)
    outs = q.new_empty((batch * heads, pieces, dim), dtype=torch.float32)
    lses = q.new_empty((batch * heads, pieces), dtype=torch.float32)
    group, tensors, tables, aligned = heads // groups, *_located(coded)
    counts = coded.k.counts if isinstance(coded.k, Ragged) else None
    _attend_codes[(batch * groups, pieces)](
        q, *tensors, *tables, counts, outs, lses, scale, *_strides(tensors), count, length, pieces, groups, group,
        padded(group), dim, padded(dim), *coded.kind, block, *aligned, num_warps=4, num_stages=stages(q),
    )  # fmt: skip
    return merged(outs, lses, torch.empty_like(q))


def coded_attention_refuses(q: Tensor, coded: Codes, scale: float) -> str | None:
    if isinstance(coded, Coded) and _tokens_of_a_tile(coded) < _LEAST:
        return f"takes blocks of a multiple of {_LEAST} tokens, got {coded.block}"
    return (
        unfit_shape(q, coded.k.shape[0], None, 1, coded.dim)
        or unfit_sharing(q.shape[1], coded.k.shape[1])
        or unfit_heads(q)
        or unfit_floats(q)
        or _unfit(coded)
        or _unfit_blocks(coded)
    )


def decode_rows(coded: Codes, rows: Tensor | None, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Turn codes of the tokens `rows` (None: all) back into keys and values [B G K D], as
    kernels/coded.py defines it. `blocks` [B G K] names the block of each token, whose range its key
    shares."""
    (batch, groups, count), dim = blocks.shape, coded.dim
    tensors, tables, aligned = _located(coded)
    k, v = (blocks.new_empty((batch, groups, count, dim), dtype=dtype) for _ in range(2))
    counts = coded.k.counts if rows is None and isinstance(coded.k, Ragged) else None
    at_once = max(1, _TILE // padded(dim))
    if count:
        _decode_rows[(triton.cdiv(count, at_once), batch * groups)](
            *tensors, *tables, counts, None if rows is None else rows.contiguous(), blocks.contiguous(), k, v,
            *_strides(tensors), count, groups, dim, padded(dim), *coded.kind[:2], at_once, *aligned, num_warps=4,
        )  # fmt: skip
    return k, v


def decode_rows_refuses(coded: Codes, rows: Tensor | None, blocks: Tensor, dtype: torch.dtype) -> str | None:
    if dtype not in DTYPES:
        return f"makes float32, bfloat16 and float16, got {dtype}"
    for numbers in (blocks, blocks if rows is None else rows):
        if reason := unfit_shape(numbers, *coded.k.shape[:2], blocks.shape[2]):
            return reason
    if rows is None and isinstance(coded.k, Tensor) and blocks.shape[2] > coded.k.shape[2]:
        return f"decodes up to {coded.k.shape[2]} tokens, got {blocks.shape[2]}"
    return _unfit(coded) or unfit(blocks)


def _tokens_of_a_tile(coded: Codes) -> int:
    """Return how many tokens a program (one instance of the kernel) reads at a time: the largest
    power of two that divides a block of these codes, and at most 32."""
    return _MOST if isinstance(coded, CodedFloats) else min(_MOST, coded.block & -coded.block)


def _located(coded: Codes) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...], tuple[int, int]]:
    """Return where codes and ranges lie, for the kernels: the four tensors of `all_four`; for each,
    where sequences differ in length (`Ragged`), the table of their addresses, else None; and the
    numbers of bytes of which all addresses of codes, and all of ranges, are multiples."""
    tensors, tables, aligned = zip(*map(located, coded.all_four), strict=True)
    return tensors, tables, (min(aligned[:2]), min(aligned[2:]))


def _strides(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the strides of each tensor [B G S ...] over sequences, heads and rows, one tensor
    after the other."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _unfit(coded: Codes) -> str | None:
    tensors = [first_of(x) for x in coded.all_four]
    if any(x.stride(3) != 1 for x in tensors):
        return "needs the codes of a row side by side"
    (batch, groups, count, _), (ranges, bits, _), dim = coded.k.shape, coded.kind, coded.dim
    width, k_range = (dim * bits // 8, 2 * dim) if bits else (dim, 2)
    of_rows = zip(coded.all_four, (count, count, None, count), (width, width, k_range, 2 * ranges), strict=True)
    sides = (unfit_shape(x, batch, groups, *sizes) for x, *sizes in of_rows)
    return next(filter(None, sides), None) or unfit(*tensors)


def _unfit_blocks(coded: Codes) -> str | None:
    """Return why the kernel cannot attend to these codes, or None: there must be a range for each
    block of keys."""
    blocks, block = coded.all_four[2].shape[2], coded.kind[2]
    if coded.k.shape[2] > blocks * block:
        return f"takes a range for each {block} keys, got {blocks} for {coded.k.shape[2]}"
    return None


@triton.jit
def _floats(row, scale, dim, there):
    """Decode floats of 8 bits: return in fp32 the numbers of the rows at the pointers `row` [n 1],
    each row times the scale at the pointer `scale` [n 1].

    Each float's bits are shifted to their places in an fp16 number, which is then 256 times too
    small and is multiplied by 256: so GPUs that have no 8-bit floats can decode them, too."""
    codes = tl.load(row + dim, mask=there, other=0).to(tl.int16)
    halves = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    scales = tl.load(scale, mask=tl.max(there.to(tl.int32), 1, keep_dims=True) > 0, other=0.0).to(tl.float32)
    return halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * scales


@triton.jit
def _numbers(row, range_row, dim, there, DIM: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr):
    """Decode integers of BITS: return in fp32 the numbers of the rows at the pointers `row` [n 1].
    Each of GROUPS groups of channels has its least number and its step at the pointers `range_row`,
    [n 1], or [1 1] if all rows share them."""
    width: tl.constexpr = DIM * BITS // 8
    codes = tl.load(row + dim % width, mask=there, other=0).to(tl.int32)
    codes = (codes >> (dim // width * BITS)) & ((1 << BITS) - 1)
    at = range_row + dim // (DIM // GROUPS)
    least = tl.load(at, mask=dim < DIM, other=0.0).to(tl.float32)
    step = tl.load(at + GROUPS, mask=dim < DIM, other=0.0).to(tl.float32)
    return codes.to(tl.float32) * step + least


@triton.jit(do_not_specialize=["count", "length", "parts"])
def _attend_codes(
    q, k, v, k_range, v_range, k_places, v_places, k_range_places, v_range_places, counts, outs, lses, scale,
    kb: tl.int64, kg: tl.int64, kt: tl.int64, vb: tl.int64, vg: tl.int64, vt: tl.int64, krb: tl.int64, krg: tl.int64,
    krt: tl.int64, vrb: tl.int64, vrg: tl.int64, vrt: tl.int64, count, length, parts, HEADS: tl.constexpr,
    GROUP: tl.constexpr, FOLD: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, RANGES: tl.constexpr,
    BITS: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, RANGE_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Attend from the GROUP query heads of one KV head to one piece of its coded tokens, and write
    the output and the log-sum-exp of the piece. SHARED tokens share a range of keys.

    counts: how many tokens each sequence has; None: `count`. A piece without any has a log-sum-exp
    of minus infinity."""
    this, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, group = this // HEADS, this % HEADS
    head, dim = tl.arange(0, FOLD), tl.arange(0, WIDE)[None, :]
    of_query = this * GROUP + head
    asked = (head < GROUP)[:, None] & (dim < DIM)
    query = tl.load(q + of_query[:, None] * DIM + dim, mask=asked, other=0.0)
    keys, key_step = head_rows(k, k_places, batch, group, kb, kg, kt, ALIGNED)
    values, value_step = head_rows(v, v_places, batch, group, vb, vg, vt, ALIGNED)
    of_blocks, block_step = head_rows(k_range, k_range_places, batch, group, krb, krg, krt, RANGE_ALIGNED)
    of_tokens, token_step = head_rows(v_range, v_range_places, batch, group, vrb, vrg, vrt, RANGE_ALIGNED)
    top = tl.full([FOLD], float("-inf"), tl.float32)
    total = tl.zeros([FOLD], tl.float32)
    mixed = tl.zeros([FOLD, WIDE], tl.float32)
    end = tl.minimum((piece + 1) * length, count)
    if counts is not None:
        end = tl.minimum(end, tl.load(counts + batch).to(tl.int32))
    for start in range(piece * length, end, BLOCK):
        token = (start + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
        there = (token < end) & (dim < DIM)
        of_token = of_tokens + token * token_step
        if BITS == 0:
            key = _floats(keys + token * key_step, of_token, dim, there)
        else:
            block = of_blocks + (start // SHARED) * block_step + tl.zeros([1, 1], tl.int32)
            key = _numbers(keys + token * key_step, block, dim, there, DIM, DIM, BITS)
        logits = product(query, tl.trans(key.to(query.dtype))) * scale
        if BITS == 0:  # floats end anywhere, and integers with a block
            logits = tl.where((start + tl.arange(0, BLOCK) < end)[None, :], logits, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        shrink, weights = tl.exp(top - highest), tl.exp(logits - highest[:, None])
        if BITS == 0:
            value = _floats(values + token * value_step, of_token + 1, dim, there)
        else:
            value = _numbers(values + token * value_step, of_token, dim, there, DIM, RANGES, BITS)
        mixed = mixed * shrink[:, None] + product(weights.to(query.dtype), value.to(query.dtype))
        total = total * shrink + tl.sum(weights, 1)
        top = highest
    to = of_query * parts + piece
    tl.store(lses + to, top + tl.log(total), mask=head < GROUP)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(outs + to[:, None] * DIM + dim, mixed, mask=asked)


@triton.jit(do_not_specialize=["count"])
def _decode_rows(
    k, v, k_range, v_range, k_places, v_places, k_range_places, v_range_places, counts, rows, blocks, k_out, v_out,
    kb: tl.int64, kg: tl.int64, kt: tl.int64, vb: tl.int64, vg: tl.int64, vt: tl.int64, krb: tl.int64, krg: tl.int64,
    krt: tl.int64, vrb: tl.int64, vrg: tl.int64, vrt: tl.int64, count, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, RANGES: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
    RANGE_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Decode the keys and values of some tokens of one KV head into `k_out` and `v_out`. `counts`:
    how many of them each sequence has; None: `count`."""
    this = tl.program_id(1).to(tl.int64)
    batch, group = this // HEADS, this % HEADS
    place = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    dim = tl.arange(0, WIDE)[None, :]
    listed = place < count
    if counts is not None:
        listed = listed & (place < tl.load(counts + batch))
    there = listed & (dim < DIM)
    row = place
    if rows is not None:
        row = tl.load(rows + this * count + place, mask=listed, other=0).to(tl.int64)
    block = tl.load(blocks + this * count + place, mask=listed, other=0).to(tl.int64)
    row = tl.where(listed, row, 0)
    keys, key_step = head_rows(k, k_places, batch, group, kb, kg, kt, ALIGNED)
    values, value_step = head_rows(v, v_places, batch, group, vb, vg, vt, ALIGNED)
    of_blocks, block_step = head_rows(k_range, k_range_places, batch, group, krb, krg, krt, RANGE_ALIGNED)
    of_tokens, token_step = head_rows(v_range, v_range_places, batch, group, vrb, vrg, vrt, RANGE_ALIGNED)
    if BITS == 0:
        key = _floats(keys + row * key_step, of_tokens + row * token_step, dim, there)
        value = _floats(values + row * value_step, of_tokens + row * token_step + 1, dim, there)
    else:
        key = _numbers(keys + row * key_step, of_blocks + block * block_step, dim, there, DIM, DIM, BITS)
        value = _numbers(values + row * value_step, of_tokens + row * token_step, dim, there, DIM, RANGES, BITS)
    to = (this * count + place) * DIM + dim
    tl.store(k_out + to, key.to(k_out.dtype.element_ty), mask=there)
    tl.store(v_out + to, value.to(v_out.dtype.element_ty), mask=there)
