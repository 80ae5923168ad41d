"""Computes decode attention: segments are cut into pieces, attended to in parallel and merged by
log-sum-exp.

This is flash-decoding (https://pytorch.org/blog/flash-decoding/) over any number of segments, with
or without chosen rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from math import lcm
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    places,
    product,
    program_at,
    stages,
    unfit_floats,
    unfit_group,
    unfit_heads,
    unfit_numbers,
    unfit_shape,
)
from kernels.ragged import Ragged, filled, first_of
from kernels.reference import Segment

_BLOCK = 64  # tokens
_PARTS = 256  # parts of a head that are merged at once, at most
_CHANNELS = tl.constexpr(32)  # channels of a head that one program merges
_QUERIES = tl.constexpr(8)  # queries whose parts one program merges where the parts lie apart
_MOST_APART = 8  # parts that lie apart
_AT_ONCE = 3  # segments that one launch reads


class _Shape(NamedTuple):
    """Hold the constants by which `_attend` is compiled for one segment."""

    lists: int  # of tokens, per sequence
    share: int  # lists of one KV head
    group: int  # query heads that read one list
    block: int  # tokens of a tile
    ahead: int  # tiles that are loaded ahead, and one (Triton's num_stages)


class _Given(NamedTuple):
    """Hold one segment as an argument of `_attend`."""

    k: Rows
    v: Rows
    rows: Tensor | None  # without gaps
    live: Numbers | None  # how many tokens of a list exist (`each`); None: all
    log_weights: Tensor | None
    shape: _Shape  # of `tl.constexpr`


# tokens of a segment's longest list, tokens of a piece of it, pieces of any list at most
_Cut = tuple[int, int, int]


def segment_attention(q: Tensor, segments: Sequence[Segment], scale: float) -> Tensor:
    """Attend from one token per sequence to all tokens of the segments under one softmax, q
    [B H 1 D] -> [B H 1 D], as kernels/reference.py defines it, without copying rows or heads."""
    return segment_attention_with_lse(q, segments, scale)[0]


def segment_attention_with_lse(
    q: Tensor, segments: Sequence[Segment], scale: float
) -> tuple[Tensor, Tensor]:
    outs, lses, _ = read_parts(q, segments, scale, packed=True)
    return merged(outs, lses, q.new_empty(q.shape))


def read_parts(
    q: Tensor, segments: Sequence[Segment], scale: float, packed: bool = False, more: int = 0
) -> tuple[Tensor, Tensor, list[int]]:
    """Attend from queries q [B H 1 D] to parts of the segments, each under a softmax of its own.

    Return three things: the results for each part, [B*H parts D] in fp32; their log-sum-exps [B*H
    parts] in fp32; and the number of the first part of each segment, followed by the number of
    parts. An empty part has a log-sum-exp of minus infinity, and its result is not written. After
    all parts the tensors have room for `more`, which the caller writes.

    If `packed`, the empty parts come last, and parts of a later segment take the numbers that this
    leaves free. So the order in which parts are merged does not depend on other sequences."""
    batch, heads, _, dim = q.shape
    q = q.contiguous()
    there = [segment for segment in segments if segment.k.shape[2] and segment.lists[1]]
    ahead = 2 if any(segment.rows is not None for segment in there) else stages(q)
    shapes = [_shape(heads, segment, ahead) for segment in there]
    given = [_given(*described) for described in zip(there, shapes, strict=True)]
    at_once = places(_shared_bytes(q, shapes), 104 if dim * q.element_size() > 128 else 80, 4)
    at_once = max(
        1, at_once - (len(segments) - 1) * max((shape.lists for shape in shapes), default=1)
    )
    cuts = [
        _cut(segment, some.live is not None, shape, at_once)
        for segment, some, shape in zip(there, given, shapes, strict=True)
    ]
    parts = sum(pieces for *_, pieces in cuts) + more
    outs = q.new_empty((batch * heads, parts, dim), dtype=torch.float32)
    lses = q.new_empty((batch * heads, parts), dtype=torch.float32)
    first = 0
    for start in range(0, len(there), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        lists = lcm(*(shape.lists for shape in shapes[some]))
        padding = ((0, 0, 0),) * (_AT_ONCE - len(cuts[some]))
        pieces = sum(pieces for *_, pieces in cuts[some])
        _attend[(batch * lists, pieces)](
            q,
            tuple(given[some]),
            outs,
            lses,
            scale,
            first,
            parts,
            at_once,
            *chain(*cuts[some], *padding),
            len(cuts[some]),
            lists,
            heads // lists,
            packed,
            dim,
        )
        first += pieces
    of_each = {id(segment): pieces for segment, (*_, pieces) in zip(there, cuts, strict=True)}
    return (
        outs,
        lses,
        list(accumulate((of_each.get(id(segment), 0) for segment in segments), initial=0)),
    )


def segment_attention_refuses(q, segments, scale):
    batch, heads, _, dim = q.shape
    if reason := unfit_shape(q, batch, heads, 1, dim):
        return reason
    for segment in segments:
        k, v, rows, live, _ = segment
        lists = segment.lists[0]
        if reason := (
            unfit_shape(k, batch, None, None, dim)
            or unfit_shape(v, *k.shape)
            or unfit_shape(rows, batch, None, None)
            or unfit_numbers(live, batch)
            or segment.unfit_weights()
        ):
            return reason
        if heads % lists or lists % k.shape[1]:
            return f"takes whole groups of heads, got {heads} query heads, {lists} lists and {k.shape[1]} KV heads"
    sharing = max(q.shape[1] // segment.lists[0] for segment in segments)
    stored = [first_of(x) for segment in segments for x in segment[:2]]
    return unfit_heads(*stored) or unfit_floats(q, stored[0]) or unfit_group(sharing)


segment_attention_with_lse_refuses = segment_attention_refuses


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    return merge_attention_with_lse(outs, lses)[0]


def merge_attention_refuses(outs, lses):
    batch, heads, tokens, _ = outs[0].shape
    if any(out.shape != outs[0].shape for out in outs) or any(
        x.numel() != batch * heads * tokens for x in lses
    ):
        return (
            f"takes one log-sum-exp per query, got {list(lses[0].shape)} for {list(outs[0].shape)}"
        )
    if len(outs) > _MOST_APART:
        return f"takes up to {_MOST_APART} parts, got {len(outs)}"
    return unfit_heads(*outs) or unfit_floats(*lses)


def merge_attention_with_lse(
    outs: Sequence[Tensor], lses: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge attention over a few parts of the keys into one softmax, outs [B H T D], lses [B H T]
    or [B H], and return its log-sum-exp too, as kernels/reference.py defines it, without copying
    the parts into one tensor."""
    (batch, heads, tokens, dim), out = outs[0].shape, torch.empty_like(outs[0])
    lse = lses[0].new_empty(lses[0].shape)
    _merge_apart[(triton.cdiv(tokens, _QUERIES), batch * heads)](
        tuple(map(located, outs)),
        tuple(located(x.view(batch, heads, tokens)) for x in lses),
        located(out),
        lse,
        tokens,
        heads,
        dim,
    )
    return out, lse


merge_attention_with_lse_refuses = merge_attention_refuses


def _shape(heads: int, segment: Segment, ahead: int) -> _Shape:
    """Return the constants by which the kernel `_attend` is compiled for a segment."""
    k, lists = segment.k, segment.lists[0]
    # as much as fits into registers
    block = _BLOCK if heads // lists <= 32 and k.dtype.itemsize == 2 else _BLOCK // 2
    return _Shape(lists, lists // k.shape[1], heads // lists, block, ahead)


def _given(segment: Segment, shape: _Shape) -> _Given:
    """Return a segment as the kernel `_attend` takes it."""
    k, v, rows, live, _ = segment
    log_weights = segment.weights_of(segment.lists[1])
    listed: Tensor | Ragged = k if rows is None else rows
    of_each = lengths_of(listed) if live is None else each(live)
    rows = None if rows is None else filled(rows).contiguous()
    constants = _Shape(*map(tl.constexpr, shape))
    return _Given(located(k), located(v), rows, of_each, log_weights, constants)


def _shared_bytes(q: Tensor, shapes: Sequence[_Shape]) -> int:
    """Return how many bytes of shared memory `_attend` takes: tiles of keys and values that are
    loaded ahead, the queries and their weights."""
    wide, size = padded(q.shape[3]), q.element_size()
    tiles = (
        2 * shape.block * wide * (shape.ahead - 1) + padded(shape.group) * (wide + shape.block)
        for shape in shapes
    )
    return size * max(tiles, default=0)


def _cut(segment: Segment, counted: bool, shape: _Shape, at_once: int) -> _Cut:
    """Say how the tokens of a segment are cut so that the pieces of one sequence fill the device
    once, which runs `at_once` programs at a time. Sequences that share a launch are each cut as
    they would be alone. counted: the device knows how many tokens of a list exist."""
    count = segment.lists[1]
    blocks, most = triton.cdiv(count, shape.block), max(1, at_once // shape.lists)
    each = triton.cdiv(blocks, most)
    return count, each * shape.block, min(blocks, most) if counted else triton.cdiv(blocks, each)


def merged(outs: Tensor, lses: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over the parts of each head, outs [B*H parts D] and log-sum-exps lses [B*H
    parts], into one softmax. Write it into `out` [B H 1 D], and return it with its log-sum-exp
    [B H]."""
    batch, heads, _, dim = out.shape
    lse, parts = out.new_empty((batch, heads), dtype=torch.float32), lses.shape[1]
    _merge[(batch * heads, triton.cdiv(dim, _CHANNELS))](
        outs, lses, out, lse, parts, dim, min(padded(parts), _PARTS), num_stages=1
    )
    return out, lse


@triton.jit
def _attend_to(
    q, segment, outs, lses, scale, this, piece, listed, count, length, part, parts, DIM: tl.constexpr
):  # fmt: skip
    """Attend from the query heads that share one list of rows (tokens) to one piece of that list,
    whose first `count` of `listed` rows exist, and write the result as part number `part` of each
    head. Rows with a log-weight of minus infinity are not loaded; without any other row a part is
    empty."""
    BLOCK: tl.constexpr = segment.shape.block
    FOLD: tl.constexpr = padded(segment.shape.group)
    WIDE: tl.constexpr = padded(DIM)
    head, dim = tl.arange(0, FOLD), tl.arange(0, WIDE)
    of_query, mine = this * segment.shape.group + head, head < segment.shape.group
    query = load(q + of_query[:, None] * DIM + dim, mine[:, None] & (dim < DIM))
    batch, group = this // segment.shape.lists, this % segment.shape.lists // segment.shape.share
    keys, key_step = head_rows(segment.k, batch, group)
    values, value_step = head_rows(segment.v, batch, group)
    top = tl.full([FOLD], float("-inf"), tl.float32)
    # summed at the end: a sum over threads waits for all of them
    totals = tl.zeros([FOLD, BLOCK], tl.float32)
    mixed = tl.zeros([FOLD, WIDE], tl.float32)
    end = tl.minimum((piece + 1) * length, count)
    for start in tl.range(piece * length, end, BLOCK, num_stages=segment.shape.ahead):
        place = start + tl.arange(0, BLOCK)
        # no load waits for a mask of its own
        read, token = place < end, tl.minimum(place, end - 1).to(tl.int64)
        there = (dim < DIM)[None, :]
        if segment.log_weights is not None:
            log_weight = tl.load(segment.log_weights + this * listed + token)
            read &= log_weight > float("-inf")
            there &= read[:, None]
        if segment.rows is not None:
            token = tl.load(segment.rows + this * listed + token)
        key = load(keys + token[:, None] * key_step + dim, there)
        value = load(values + token[:, None] * value_step + dim, there)
        logits = product(query, tl.trans(key)) * scale
        if segment.log_weights is not None:
            logits += log_weight[None, :]
        logits = tl.where(read, logits, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        shift = highest
        if segment.log_weights is not None:
            shift = finite(highest)
        shrink, weights = tl.exp(top - shift), tl.exp(logits - shift[:, None])
        mixed = mixed * shrink[:, None] + product(weights.to(value.dtype), value)
        totals = totals * shrink[:, None] + weights
        top = highest
    total, to = tl.sum(totals, 1), of_query * parts + part
    tl.store(lses + to, top + tl.log(total), mask=mine)
    mixed = mixed / total[:, None]
    tl.store(outs + to[:, None] * DIM + dim, mixed, mask=mine[:, None] & (dim < DIM))


@triton.jit(
    do_not_specialize=["first", "parts", "at_once", "c0", "l0", "p0", "c1", "l1", "p1", "c2", "l2", "p2"]
)  # fmt: skip
def _attend(
    q, segments, outs, lses, scale, first, parts, at_once, c0, l0, p0, c1, l1, p1, c2, l2, p2,
    SEGMENTS: tl.constexpr, LISTS: tl.constexpr, HEADS: tl.constexpr, PACKED: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Attend to one piece of one of up to three segments. Segment i has up to ci rows in a list,
    cut into pi pieces of li rows. LISTS is a multiple of every segment's number of lists; a segment
    with fewer lists leaves some programs without work.

    A segment's `live` says how many rows of a list exist. Then a list is cut by that number, into
    as many pieces as it would be alone. The parts that are left over get a log-sum-exp of minus
    infinity; if PACKED, they come last, else at the end of each segment."""
    program, piece = program_at(0), tl.program_id(1)
    place = first + piece
    counts, lengths, pieces = (c0, c1, c2), (l0, l1, l2), (p0, p1, p2)
    for index in tl.static_range(SEGMENTS):  # Triton 3.6 counts no tuple with None in it
        if piece >= 0:
            # not under a name of its own, which would make its constants numbers
            this = program // (LISTS // segments[index].shape.lists)
            count, length, some = counts[index], lengths[index], pieces[index]
            if segments[index].live is not None:
                count = number_of(segments[index].live, this // segments[index].shape.lists, count)
                count = tl.minimum(count, counts[index])
                blocks = tl.cdiv(count, segments[index].shape.block)
                most = tl.maximum(at_once // segments[index].shape.lists, 1)
                each = tl.maximum(tl.cdiv(blocks, most), 1)
                length, some = each * segments[index].shape.block, tl.cdiv(blocks, each)
            if (piece < some) & (program % (LISTS // segments[index].shape.lists) == 0):
                _attend_to(
                    q, segments[index], outs, lses, scale, this, piece, counts[index], count, length, place, parts, DIM
                )  # fmt: skip
            if PACKED:
                piece -= some
            else:
                behind = tl.where(piece < pieces[index], 1 << 30, piece - pieces[index])
                piece = tl.where(piece < some, -1, behind)
    if piece >= 0:
        head = tl.arange(0, 64)  # a list has no more query heads
        to = lses + (program * HEADS + head) * parts + place
        tl.store(to, tl.full([64], float("-inf"), tl.float32), mask=head < HEADS)


@triton.jit(do_not_specialize=["parts"])
def _merge(outs, lses, out, lse, parts, DIM: tl.constexpr, PARTS: tl.constexpr):
    """Merge some channels of attention over the parts of one head into one softmax, weighted by
    their log-sum-exps; an empty part has one of minus infinity. Up to PARTS of them are loaded at
    once, so that there is one trip to memory."""
    head, dim = (
        program_at(0),
        tl.program_id(1) * _CHANNELS + tl.arange(0, _CHANNELS),
    )
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([_CHANNELS], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        at, there = head * parts + part, (part < parts)[:, None] & (dim < DIM)
        weight = load_logits(lses + at, part < parts)
        rows = load(outs + at[:, None] * DIM + dim, there)
        rows = tl.where(weight[:, None] == float("-inf"), 0.0, rows)  # nobody writes an empty part
        highest = tl.maximum(top, tl.max(weight, 0))
        shift = finite(highest)
        weight, shrink = tl.exp(weight - shift), tl.exp(top - shift)
        mixed = mixed * shrink + tl.sum(rows * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        top = highest
    zero = tl.arange(0, 1)
    tl.store(lse + head + zero, top + tl.log(total), mask=(tl.program_id(1) == 0) & (zero == 0))
    tl.store(out + head * DIM + dim, mixed / tl.where(total > 0, total, 1.0), mask=dim < DIM)


@triton.jit(do_not_specialize=["tokens"])
def _merge_apart(parts, parts_lse, out, lse, tokens, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Merge a few parts, each of which has tensors of its own for attention and its log-sum-exp, of
    some queries of one head into one softmax."""
    this = program_at(1)
    batch, head, dim = this // HEADS, this % HEADS, tl.arange(0, padded(DIM))
    query = program_at(0) * _QUERIES + tl.arange(0, _QUERIES)
    there = (query < tokens)[:, None] & (dim < DIM)
    top = tl.full([_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([_QUERIES], tl.float32)
    mixed = tl.zeros(there.shape, tl.float32)
    for index in tl.static_range(len(parts)):
        rows, step = head_rows(parts[index], batch, head)
        row = load_wide(rows + query[:, None] * step + dim, there)
        weights, apart = head_rows(parts_lse[index], batch, head)
        weight = load(weights + query * apart, query < tokens)
        highest = tl.maximum(top, weight)
        shift = finite(highest)
        weight, shrink = tl.exp(weight - shift), tl.exp(top - shift)
        mixed = mixed * shrink[:, None] + row * weight[:, None]
        total = total * shrink + weight
        top = highest
    tl.store(lse + this * tokens + query, top + tl.log(total), mask=query < tokens)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    rows, step = head_rows(out, batch, head)
    tl.store(rows + query[:, None] * step + dim, mixed, mask=there)
