"""Estimates the weights of chosen tokens by keys in 4 bits, and finds which tokens carry a share of
them.

How far logits lie below the largest of their row is a whole number of 31 bits. Two launches add up the
weights by 8 bits of it each, in pieces of a row: they know then which tokens lie in the last bin that
is needed, 2**-11 nats wide. A third marks all tokens before it, and as many of its own, in order, as
the share takes: so weights that differ by less than 0.05 % count as equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.codes import halves, queries_of
from kernels.gpu.common import (
    Numbers,
    Rows,
    each,
    finite,
    head_rows,
    lengths_of,
    load,
    load_logits,
    load_wide,
    located,
    number_of,
    padded,
    product,
    program_at,
    unfit,
    unfit_floats,
    unfit_group,
    unfit_heads,
    unfit_shape,
)
from kernels.ragged import Ragged, filled, first_of
from kernels.reference import Segment
from kernels.top_p import KeyCodes

_BLOCK = tl.constexpr(64)  # tokens that are multiplied at a time
_PARTS = 16  # programs that share the tokens that are always read
_BINS = tl.constexpr(256)
_FINE = tl.constexpr(8)  # bits of a bin's number
_AT_ONCE = tl.constexpr(32)  # tokens that are put into bins at a time
_PIECE, _MOST_PIECES = 512, 64  # tokens of a piece at least, and pieces of a row
_COUNTED = tl.constexpr(4096)  # log-weights that are counted at a time


def estimated_logits(q: Tensor, keys: KeyCodes, rows: Tensor | Ragged) -> tuple[Tensor, Tensor]:
    """Multiply queries q [B G g D] with the quantised keys of chosen tokens, rows [B G|H K], as
    kernels/top_p.py defines it. -> [B G g K] or [B H 1 K], and the largest of each block of tokens"""
    (batch, groups, heads, dim), (_, lists, count) = q.shape, rows.shape
    heads = groups * heads // lists
    blocks = triton.cdiv(count, _BLOCK.value)
    out = q.new_empty((batch, lists, heads, count), dtype=torch.float32)
    tops = q.new_empty((batch, lists, heads, blocks), dtype=torch.float32)
    if count:
        _estimate[(blocks, batch * lists)](
            q.contiguous(), located(keys.codes), located(keys.ranges), filled(rows).contiguous(),
            lengths_of(rows), out, tops, count, lists, lists // groups, heads, dim,
        )  # fmt: skip
    return out, tops


def estimated_logits_refuses(q, keys, rows):
    codes, ranges = map(first_of, keys)
    if codes.stride(3) != 1 or ranges.stride(3) != 1:
        return "needs the codes of a row side by side"
    lists, groups = rows.shape[1], q.shape[1]
    if lists not in (groups, groups * q.shape[2]):
        return (
            f"takes a choice for each KV head or each query head, got {lists} for {groups} KV heads"
        )
    return (
        unfit_shape(keys.codes, *q.shape[:2], None, q.shape[3] // 2)
        or unfit_shape(keys.ranges, *q.shape[:2], None, 2)
        or unfit_shape(rows, len(q), lists, None)
        or unfit_heads(q)
        or unfit_group(q.shape[2])
        or unfit(codes, ranges, filled(rows))
    )


class _Keys(NamedTuple):
    """Hold the keys of one segment as an argument of `_log_sum_exps`."""

    rows: Rows
    live: Numbers | None  # how many of `size` rows exist; None: all
    size: int


def log_sum_exps(q: Tensor, segments: Sequence[Segment], scale: float) -> Tensor:
    """Return numbers whose log-sum-exp is that of all scaled products of queries q [B G g D] with
    the keys of `segments`, as kernels/top_p.py defines it. -> [B G g 16]"""
    batch, groups, heads, dim = q.shape
    out = q.new_empty((batch, groups, heads, _PARTS), dtype=torch.float32)
    given = tuple(
        _Keys(located(x.k), lengths_of(x.k) if x.live is None else each(x.live), int(x.k.shape[2]))
        for x in segments
    )
    _log_sum_exps[(batch * groups, _PARTS)](
        q.contiguous(), given, out, scale, len(given), groups, heads, dim
    )
    return out


def log_sum_exps_refuses(q, segments, scale):
    keys = [first_of(x.k) for x in segments]
    sides = (unfit_shape(x.k, *q.shape[:2], None, q.shape[3]) for x in segments)
    return (
        next(filter(None, sides), None)
        or unfit_heads(q, *keys)
        or unfit_floats(q, *keys)
        or unfit_group(q.shape[2])
    )


def carrying(logits: Tensor, tops: Tensor, always: Tensor, mass: float, scale: float) -> Tensor:
    """Return log-weights of the candidates, [B C K], 0 for those that carry a share `mass` of the
    weights, as kernels/top_p.py defines it. logits [B C h K], tops [B C h n], always [B C h P]"""
    batch, lists, heads, count = logits.shape
    piece = max(_PIECE, triton.next_power_of_2(triton.cdiv(count, _MOST_PIECES)))
    pieces, rows = triton.cdiv(count, piece), batch * lists * heads
    out = logits.new_empty((batch, lists, count))
    sums = logits.new_empty((2, rows, pieces, _BINS.value))
    row = (
        logits.contiguous(), tops.contiguous(), always.contiguous(), *sums, scale, 1 - mass, count,
        pieces, tops.shape[3], always.shape[3],
    )  # fmt: skip
    sizes = padded(pieces, 1), padded(tops.shape[3], 1), padded(always.shape[3], 1), piece
    if count:
        for level in range(2 if mass < 1 else 0):
            _sums[(pieces, rows)](*row, level, *sizes, num_warps=8)
        _mark[(pieces, batch * lists)](*row, out, heads, mass == 1, *sizes, num_warps=8)
    return out


def carrying_refuses(logits, tops, always, mass, scale):
    rows = logits.shape[:3]
    sides = unfit_shape(tops, *rows, None) or unfit_shape(always, *rows, None)
    if {logits.dtype, tops.dtype, always.dtype} != {torch.float32}:
        return f"takes float32, got {logits.dtype}"
    return sides or unfit(logits, tops, always)


def count_read(log_weights: Tensor, counts: Tensor) -> None:
    """Add to counts [B C] (int64) how many tokens of each list are read, as kernels/top_p.py defines
    it, log_weights [B C K]."""
    batch, lists, count = log_weights.shape
    _count_read[(batch * lists,)](log_weights.contiguous(), counts, counts.stride(0), count, lists)


def count_read_refuses(log_weights, counts):
    sides = unfit_shape(counts, *log_weights.shape[:2])
    return sides or unfit_floats(log_weights) or unfit(counts)


@triton.jit(do_not_specialize=["count"])
def _estimate(
    q, codes, ranges, rows, counts, out, tops, count, LISTS: tl.constexpr, SHARE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Multiply the HEADS queries of one list of rows (tokens) with a block of its keys. SHARE lists
    are of one KV head. `counts`: how many rows each sequence names; None: `count`."""
    this = program_at(1)
    WIDTH: tl.constexpr = DIM // 2
    batch, group = this // LISTS, this % LISTS // SHARE
    at, byte = (
        tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK),
        tl.arange(0, padded(WIDTH))[None, :],
    )
    there = at < number_of(counts, batch, count)
    row = load(rows + this * count + at, there).to(tl.int64)[:, None]
    keys, step = head_rows(codes, batch, group)
    spans, apart = head_rows(ranges, batch, group)
    packed = load(keys + row * step + byte, there[:, None] & (byte < WIDTH))
    asked = q + this * HEADS * DIM
    low = queries_of(asked, None, byte, byte < WIDTH, HEADS, DIM)
    high = queries_of(asked, None, WIDTH + byte, byte < WIDTH, HEADS, DIM)
    logits = product(low, tl.trans(halves(packed & 15).to(low.dtype)))
    logits += product(high, tl.trans(halves(packed >> 4).to(low.dtype)))
    sums = tl.sum(low.to(tl.float32) + high.to(tl.float32), 1, keep_dims=True)
    least, steps = (
        load_wide(spans + row * apart, there[:, None]),
        load_wide(spans + row * apart + 1, there[:, None]),
    )
    logits = tl.where(there, logits * tl.trans(steps) + sums * tl.trans(least), float("-inf"))
    head = tl.arange(0, padded(HEADS))
    of_head = this * HEADS + head
    tl.store(
        out + of_head[:, None] * count + at, logits, mask=(head < HEADS)[:, None] & (at < count)
    )
    tl.store(
        tops + of_head * tl.num_programs(0) + tl.program_id(0), tl.max(logits, 1), mask=head < HEADS
    )


@triton.jit
def _log_sum_exps(
    q, keys, out, scale, SEGMENTS: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """Compute the log-sum-exp of the scaled products of HEADS queries with some blocks of the keys of
    several segments."""
    this, part = program_at(0), tl.program_id(1)
    head, dim = tl.arange(0, padded(HEADS)), tl.arange(0, padded(DIM))[None, :]
    query = queries_of(q + this * HEADS * DIM, None, dim, dim < DIM, HEADS, DIM)
    top = tl.full([head.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([head.shape[0]], tl.float32)
    for index in tl.static_range(SEGMENTS):
        rows, step = head_rows(keys[index].rows, this // GROUPS, this % GROUPS)
        count = number_of(keys[index].live, this // GROUPS, keys[index].size)
        count = tl.minimum(count, keys[index].size)
        for start in range(part * _BLOCK, count, tl.num_programs(1) * _BLOCK):
            at = start + tl.arange(0, _BLOCK)
            there = (at < count)[:, None] & (dim < DIM)
            logits = product(query, tl.trans(load(rows + at[:, None] * step + dim, there))) * scale
            logits = tl.where(at < count, logits, float("-inf"))
            highest = tl.maximum(top, tl.max(logits, 1))
            shift = finite(highest)
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(logits - shift[:, None]), 1)
            top = highest
    to = out + (this * HEADS + head) * tl.num_programs(1) + part
    tl.store(to, top + tl.log(total), mask=head < HEADS)


@triton.jit
def _whole(tops, always, row, scale, blocks, parts, BLOCKS: tl.constexpr, PARTS: tl.constexpr):
    """Return the largest scaled logit of a row, or a larger number, and what the tokens that are
    always read weigh beside it."""
    block, part = tl.arange(0, BLOCKS), tl.arange(0, PARTS)
    largest = load_logits(tops + row * blocks + block, block < blocks)
    own = load_logits(always + row * parts + part, part < parts)
    top = finite(tl.maximum(tl.max(largest, 0) * scale, tl.max(own, 0)))
    return top, tl.sum(tl.exp(own - top), 0)


@triton.jit
def _weighed(x, at, there, top, scale):
    """Return how far the scaled logits of some tokens lie below `top`, in 2**-26 nats and up to 32
    nats, and what they weigh beside it."""
    value = load_logits(x + at, there) * scale
    below = tl.minimum(top - value, 31.9)
    return (below * 67108864.0).to(tl.int32), tl.exp(value - top)


@triton.jit
def _bins(sums, row, pieces, PIECES: tl.constexpr):
    """Return the weights of a row's bins, of all its pieces together."""
    piece, bin = tl.arange(0, PIECES)[:, None], tl.arange(0, _BINS)[None, :]
    return tl.sum(load(sums + (row * pieces + piece) * _BINS + bin, piece < pieces), 0)


@triton.jit
def _last(bins, left, spare):
    """Return the number of the last bin that is needed, if what lies behind all of them weighs
    `left`, and `spare` may be left out; -1 if none is. Return also what lies behind it."""
    behind = left + tl.cumsum(bins, 0, reverse=True)
    last = tl.sum((behind > spare).to(tl.int32), 0) - 1
    return last, left + tl.sum(tl.where(tl.arange(0, _BINS) > last, bins, 0.0), 0)


@triton.jit(do_not_specialize=["count", "pieces", "blocks", "parts"])
def _sums(
    x, tops, always, coarse, fine, scale, share, count, pieces, blocks, parts, LEVEL: tl.constexpr,
    PIECES: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Add up the weights of a piece of a row by the first 8 bits of how far they lie below the top,
    or, at LEVEL 1, by the next 8 bits those of the last bin that is needed. `share`: of all weights,
    what may be left out."""
    row, piece = program_at(1), tl.program_id(0)
    top, own = _whole(tops, always, row, scale, blocks, parts, BLOCKS, PARTS)
    last = 0
    if LEVEL == 1:
        bins = _bins(coarse, row, pieces, PIECES)
        last, _ = _last(bins, 0.0, share * (own + tl.sum(bins, 0)))
    bin = tl.arange(0, _BINS)[:, None]
    total = tl.zeros([_BINS, _AT_ONCE], tl.float32)
    for start in tl.range(
        piece * PIECE, tl.minimum((piece + 1) * PIECE, count), _AT_ONCE, num_stages=3
    ):
        at = start + tl.arange(0, _AT_ONCE)
        below, weight = _weighed(x + row * count, at, at < count, top, scale)
        digit = below >> (31 - _FINE)
        if LEVEL == 1:
            weight = tl.where(digit == last, weight, 0.0)
            digit = (below >> (31 - 2 * _FINE)) & (_BINS - 1)
        total += tl.where(bin == digit[None, :], weight[None, :], 0.0)
    sums = fine if LEVEL == 1 else coarse
    to = (row * pieces + piece) * _BINS + tl.arange(0, _BINS)
    tl.store(sums + to, tl.sum(total, 1))


@triton.jit(do_not_specialize=["count", "pieces", "blocks", "parts"])
def _mark(
    x, tops, always, coarse, fine, scale, share, count, pieces, blocks, parts, out, HEADS: tl.constexpr,
    ALL: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Write 0 for those tokens of a piece of a list that any of its HEADS query heads needs, and
    minus infinity for the others."""
    this, piece = program_at(1), tl.program_id(0)
    at = piece * PIECE + tl.arange(0, PIECE)
    read = tl.zeros([PIECE], tl.int1)
    for head in range(HEADS):
        row = this * HEADS + head
        top, own = _whole(tops, always, row, scale, blocks, parts, BLOCKS, PARTS)
        below, weight = _weighed(x + row * count, at, at < count, top, scale)
        there = load_logits(x + row * count + at, at < count) > float("-inf")
        if not ALL:
            bins = _bins(coarse, row, pieces, PIECES)
            spare = share * (own + tl.sum(bins, 0))
            first, left = _last(bins, 0.0, spare)
            bins = _bins(fine, row, pieces, PIECES)
            second, left = _last(bins, left, spare)
            second = tl.maximum(second, 0)  # by rounding alone none is needed
            last = tl.where(first < 0, -1, (first << _FINE) + second)
            number = below >> (31 - 2 * _FINE)
            weight = tl.where(number == last, weight, 0.0)
            later = tl.arange(0, PIECES)
            at_bin = fine + (row * pieces + later) * _BINS + second
            left += tl.sum(load(at_bin, (later >= piece) & (later < pieces)), 0)
            behind = left - (tl.cumsum(weight, 0) - weight)
            there &= (number < last) | ((number == last) & (behind > spare))
        read |= there
    tl.store(out + this * count + at, tl.where(read, 0.0, float("-inf")), mask=at < count)


@triton.jit(do_not_specialize=["count"])
def _count_read(log_weights, counts, apart: tl.int64, count, LISTS: tl.constexpr):
    """Add to a list's entry in `counts` how many of its log-weights are not minus infinity."""
    this = program_at(0)
    total = tl.zeros([_COUNTED], tl.int32)
    for start in range(0, count, _COUNTED):
        at = start + tl.arange(0, _COUNTED)
        value = load_logits(log_weights + this * count + at, at < count)
        total += (value > float("-inf")).to(tl.int32)
    to = counts + this // LISTS * apart + this % LISTS
    tl.store(to, tl.load(to) + tl.sum(total, 0))
