"""Computes decode attention: segments are cut into pieces, attended to in parallel and merged by
log-sum-exp.

This is flash-decoding (https://pytorch.org/blog/flash-decoding/) over any number of segments, with
or without chosen rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import lcm
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import (
    head_rows,
    located,
    padded,
    product,
    split,
    stages,
    unfit_floats,
    unfit_group,
    unfit_heads,
    unfit_numbers,
    unfit_shape,
)
from kernels.ragged import Ragged, first_of
from kernels.reference import Segment

_BLOCK = 64  # tokens
_PARTS = 256  # parts of a head that are merged at once, at most
_CHANNELS = 32  # channels of a head that one program merges
_QUERIES = 8  # queries whose parts one program merges where the parts lie apart
_MOST_APART = 8  # parts that lie apart
_AT_ONCE = 3  # segments that one launch reads


def segment_attention(q: Tensor, segments: Sequence[Segment], scale: float) -> Tensor:
    """Attend from one token per sequence to all tokens of the segments under one softmax, q
    [B H 1 D] -> [B H 1 D], as kernels/reference.py defines it, without copying rows or heads."""
    return segment_attention_with_lse(q, segments, scale)[0]


def segment_attention_with_lse(q: Tensor, segments: Sequence[Segment], scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, _, dim = q.shape
    q = q.contiguous()
    cuts = [_cut(batch, segment) for segment in segments]
    parts = sum(pieces for pieces, _ in cuts)
    outs = q.new_empty((batch * heads, parts, dim), dtype=torch.float32)
    lses = q.new_empty((batch * heads, parts), dtype=torch.float32)
    there = [(segment, *cut) for segment, cut in zip(segments, cuts, strict=True) if cut[0]]
    first = 0
    for start in range(0, len(there), _AT_ONCE):
        some = there[start : start + _AT_ONCE]
        _read(q, some, scale, outs, lses, first)
        first += sum(pieces for _, pieces, _ in some)
    return merged(outs, lses, torch.empty_like(q))


def segment_attention_refuses(q: Tensor, segments: Sequence[Segment], scale: float) -> str | None:
    batch, heads, _, dim = q.shape
    if reason := unfit_shape(q, batch, heads, 1, dim):
        return reason
    for k, v, rows, live in segments:
        if reason := (
            unfit_shape(k, batch, None, None, dim)
            or unfit_shape(v, *k.shape)
            or (None if rows is None else unfit_shape(rows, batch, None, None))
            or unfit_numbers(live, batch)
        ):
            return reason
        lists = (k if rows is None else rows).shape[1]
        if heads % lists or lists % k.shape[1]:
            return f"takes whole groups of heads, got {heads} query heads, {lists} lists and {k.shape[1]} KV heads"
    sharing = max(q.shape[1] // (k if rows is None else rows).shape[1] for k, _, rows, _ in segments)
    stored = [first_of(x) for segment in segments for x in segment[:2]]
    return unfit_heads(*stored) or unfit_floats(q, stored[0]) or unfit_group(sharing)


def segment_attention_with_lse_refuses(q: Tensor, segments: Sequence[Segment], scale: float) -> str | None:
    return segment_attention_refuses(q, segments, scale)


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    return merge_attention_with_lse(outs, lses)[0]


def merge_attention_refuses(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> str | None:
    batch, heads, tokens, _ = outs[0].shape
    if any(out.shape != outs[0].shape for out in outs) or any(x.numel() != batch * heads * tokens for x in lses):
        return f"takes one log-sum-exp per query, got {list(lses[0].shape)} for {list(outs[0].shape)}"
    if len(outs) > _MOST_APART:
        return f"takes up to {_MOST_APART} parts, got {len(outs)}"
    return unfit_heads(*outs) or unfit_floats(*lses)


def merge_attention_with_lse(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over a few parts of the keys into one softmax, outs [B H T D], lses [B H T]
    or [B H], and return its log-sum-exp too, as kernels/reference.py defines it, without copying
    the parts into one tensor."""
    (batch, heads, tokens, dim), out = outs[0].shape, torch.empty_like(outs[0])
    lse = lses[0].new_empty(lses[0].shape)
    both = zip(outs, (x.view(batch, heads, tokens) for x in lses), strict=True)
    parts = tuple((part, part_lse, *part.stride()[:3], *part_lse.stride()) for part, part_lse in both)
    _merge_apart[(triton.cdiv(tokens, _QUERIES), batch * heads)](
        parts, out, lse, *out.stride()[:3], tokens, heads, dim, padded(dim), _QUERIES
    )
    return out, lse


def merge_attention_with_lse_refuses(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> str | None:
    return merge_attention_refuses(outs, lses)


def _cut(batch: int, segment: Segment) -> tuple[int, int]:
    """Return into how many pieces the tokens of a segment are cut, and how long these are; (0, 0)
    for an empty segment."""
    lists = segment.k if segment.rows is None else segment.rows
    return split(lists.shape[2], batch * lists.shape[1], _BLOCK) if lists.shape[2] else (0, 0)


def _read(
    q: Tensor, segments: Sequence[tuple[Segment, int, int]], scale: float, outs: Tensor, lses: Tensor, first: int
) -> None:
    """Attend to each piece of a few segments, given as (segment, number of pieces, length of a
    piece). Write the results of the pieces into `outs` and `lses`, from place `first` on."""
    batch, heads, _, dim = q.shape
    given, numbers, shapes = zip(*(_arguments(heads, *segment) for segment in segments), strict=True)
    lists = lcm(*(shape[1] for shape in shapes))
    pieces = sum(piece for _, piece, _ in segments)
    padding = ((0, 0, 0),) * (_AT_ONCE - len(segments))
    _attend[(batch * lists, pieces)](
        q, given, outs, lses, scale, first, outs.shape[1], *chain(*numbers, *padding), len(segments), lists, shapes,
        dim, padded(dim), num_warps=4, num_stages=stages(q),
    )  # fmt: skip


def _arguments(heads: int, segment: Segment, pieces: int, length: int) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """Return what the kernel `_attend` takes for one segment, cut into `pieces` of `length`: its
    tensors and strides, the numbers that change from step to step, and the constants by which it is
    compiled."""
    rows, live = _listed(segment)
    (k, k_places, k_aligned), (v, v_places, v_aligned) = map(located, segment[:2])
    lists, count = (k if rows is None else rows).shape[1], (segment.k if rows is None else rows).shape[2]
    each, fold = int(live is not None and len(live) > 1), padded(heads // lists)
    given = k, v, k_places, v_places, rows, live, *k.stride()[:3], *v.stride()[:3]
    shape = each, lists, lists // k.shape[1], heads // lists, fold, _BLOCK if fold <= 32 else _BLOCK // 2
    return given, (count, length, pieces), (*shape, min(k_aligned, v_aligned))


def _listed(segment: Segment) -> tuple[Tensor | None, Tensor | None]:
    """Return a segment's `rows` [B lists K], padded where sequences have different numbers of them,
    and how many exist for each sequence; None for all rows, and None where all exist."""
    k, _, rows, live = segment
    listed: Tensor | Ragged = k if rows is None else rows
    if not isinstance(listed, Ragged):
        return None if rows is None else rows.contiguous(), live
    return None if rows is None else listed.whole.contiguous(), listed.counts if live is None else live


def merged(outs: Tensor, lses: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over the parts of each head, outs [B*H parts D] and log-sum-exps lses [B*H
    parts], into one softmax. Write it into `out` [B H 1 D], and return it with its log-sum-exp
    [B H]."""
    batch, heads, _, dim = out.shape
    lse, parts = out.new_empty((batch, heads), dtype=torch.float32), lses.shape[1]
    _merge[(batch * heads, triton.cdiv(dim, _CHANNELS))](
        outs, lses, out, lse, parts, dim, min(padded(parts), _PARTS), _CHANNELS, num_warps=4, num_stages=1
    )
    return out, lse


@triton.jit
def _attend_to(
    q, segments, outs, lses, scale, this, piece, count, length, first, parts, INDEX: tl.constexpr,
    SHAPES: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Attend from the GROUP query heads that share one list of rows (tokens) to one piece of that
    list. A KV head has SHARE lists: one if its query heads read the same tokens.

    A segment's `live` says how many rows of a list exist, one number for each sequence if EACH is
    1, one for all if it is 0. A piece without any has a log-sum-exp of minus infinity."""
    k, v, k_places, v_places, rows, live, kb, kg, kt, vb, vg, vt = segments[INDEX]
    EACH: tl.constexpr = SHAPES[INDEX][0]
    LISTS: tl.constexpr = SHAPES[INDEX][1]
    SHARE: tl.constexpr = SHAPES[INDEX][2]
    GROUP: tl.constexpr = SHAPES[INDEX][3]
    FOLD: tl.constexpr = SHAPES[INDEX][4]
    BLOCK: tl.constexpr = SHAPES[INDEX][5]
    ALIGNED: tl.constexpr = SHAPES[INDEX][6]
    head, dim = tl.arange(0, FOLD), tl.arange(0, WIDE)
    of_query = this * GROUP + head
    query = tl.load(q + of_query[:, None] * DIM + dim, mask=(head < GROUP)[:, None] & (dim < DIM), other=0.0)
    batch, group = this // LISTS, this % LISTS // SHARE
    keys, key_step = head_rows(k, k_places, batch, group, kb, kg, kt, ALIGNED)
    values, value_step = head_rows(v, v_places, batch, group, vb, vg, vt, ALIGNED)
    top = tl.full([FOLD], float("-inf"), tl.float32)
    total = tl.zeros([FOLD], tl.float32)
    mixed = tl.zeros([FOLD, WIDE], tl.float32)
    end = tl.minimum((piece + 1) * length, count)
    if live is not None:
        end = tl.minimum(end, tl.load(live + batch * EACH).to(tl.int32))
    for start in range(piece * length, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        read = token < end
        if rows is not None:
            token = tl.load(rows + this * count + token, mask=read, other=0)
        at, there = token.to(tl.int64)[:, None], read[:, None] & (dim < DIM)
        key = tl.load(keys + at * key_step + dim, mask=there, other=0.0)
        logits = tl.where(read, product(query, tl.trans(key)) * scale, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        shrink, weights = tl.exp(top - highest), tl.exp(logits - highest[:, None])
        value = tl.load(values + at * value_step + dim, mask=there, other=0.0)
        mixed = mixed * shrink[:, None] + product(weights.to(value.dtype), value)
        total = total * shrink + tl.sum(weights, 1)
        top = highest
    to = of_query * parts + first + piece
    tl.store(lses + to, top + tl.log(total), mask=head < GROUP)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(outs + to[:, None] * DIM + dim, mixed, mask=(head < GROUP)[:, None] & (dim < DIM))


@triton.jit(
    do_not_specialize=["first", "parts", "c0", "l0", "p0", "c1", "l1", "p1", "c2", "l2", "p2"]
)  # fmt: skip
def _attend(
    q, segments, outs, lses, scale, first, parts, c0, l0, p0, c1, l1, p1, c2, l2, p2, SEGMENTS: tl.constexpr,
    LISTS: tl.constexpr, SHAPES: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Attend to one piece of one of up to three segments. Segment i has ci rows in a list, cut into
    pi pieces of li rows. LISTS is a multiple of every segment's number of lists; a segment with
    fewer lists leaves some programs without work."""
    program, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    counts, lengths, pieces = (c0, c1, c2), (l0, l1, l2), (p0, p1, p2)
    for index in tl.static_range(SEGMENTS):
        apart = LISTS // SHAPES[index][1]
        if (piece >= 0) & (piece < pieces[index]) & (program % apart == 0):
            _attend_to(
                q, segments, outs, lses, scale, program // apart, piece, counts[index], lengths[index], first, parts,
                index, SHAPES, DIM, WIDE,
            )  # fmt: skip
        piece -= pieces[index]
        first += pieces[index]


@triton.jit(do_not_specialize=["parts"])
def _merge(
    outs, lses, out, lse, parts, DIM: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Merge some channels of attention over the parts of one head into one softmax, weighted by
    their log-sum-exps; an empty part has one of minus infinity. Up to PARTS of them are loaded at
    once, so that there is one trip to memory."""
    head, dim = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        at, there = head * parts + part, (part < parts)[:, None] & (dim < DIM)
        weight = tl.load(lses + at, mask=part < parts, other=float("-inf"))
        rows = tl.load(outs + at[:, None] * DIM + dim, mask=there, other=0.0)
        highest = tl.maximum(top, tl.max(weight, 0))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weight, shrink = tl.exp(weight - shift), tl.exp(top - shift)
        mixed = mixed * shrink + tl.sum(rows * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        top = highest
    zero = tl.arange(0, 1)
    tl.store(lse + head + zero, top + tl.log(total), mask=(tl.program_id(1) == 0) & (zero == 0))
    tl.store(out + head * DIM + dim, mixed / tl.where(total > 0, total, 1.0), mask=dim < DIM)


@triton.jit(do_not_specialize=["tokens"])
def _merge_apart(
    parts, out, lse, ob, oh, ot, tokens, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """Merge a few parts, each of which has tensors of its own (attention, log-sum-exp and their
    strides), of some queries of one head into one softmax."""
    this = tl.program_id(1).to(tl.int64)
    batch, head = this // HEADS, this % HEADS
    query, dim = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, WIDE)
    there = (query < tokens)[:, None] & (dim < DIM)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDE], tl.float32)
    for index in tl.static_range(len(parts)):
        part, part_lse, pb, ph, pt, lb, lh, lt = parts[index]
        row = tl.load(part + batch * pb + head * ph + query[:, None] * pt + dim, mask=there, other=0.0).to(tl.float32)
        weight = tl.load(part_lse + batch * lb + head * lh + query * lt, mask=query < tokens, other=0.0)
        highest = tl.maximum(top, weight)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weight, shrink = tl.exp(weight - shift), tl.exp(top - shift)
        mixed = mixed * shrink[:, None] + row * weight[:, None]
        total = total * shrink + weight
        top = highest
    tl.store(lse + this * tokens + query, top + tl.log(total), mask=query < tokens)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + batch * ob + head * oh + query[:, None] * ot + dim, mixed, mask=there)
