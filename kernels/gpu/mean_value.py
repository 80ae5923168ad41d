"""Merges attention over parts and mixes in the mean of all values, for the tokens that are not read
(SparQ)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.choose import joined
from kernels.gpu.common import (
    each,
    finite,
    load,
    load_logits,
    load_wide,
    number_of,
    padded,
    program_at,
    unfit,
    unfit_numbers,
    unfit_shape,
)
from kernels.gpu.decode import read_parts, segment_attention_refuses
from kernels.reference import Segment

_CHANNELS = tl.constexpr(32)  # of a head that one program mixes
_PARTS = 512  # parts, of all heads of a group, that are loaded at once, at most


def attention_with_mean(
    q: Tensor, segments: Sequence[Segment], scale: float, chosen: int, lses: Tensor, sink_logits: Tensor | None,
    value_sum: Tensor, v: Tensor, count: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend to all segments, and mix the mean of all values into the result, as
    kernels/mean_value.py defines it: one kernel attends from queries and approximate queries to
    parts of the segments, another does all the rest. -> [B H 1 D], [B G g 1]"""
    batch, groups, both, dim = q.shape
    group = both // 2
    outs, parts, starts = read_parts(q.view(batch, -1, 1, dim), segments, scale)
    out = q.new_empty((batch, groups * group, 1, dim))
    covered = q.new_empty((batch, groups, group, 1), dtype=torch.float32)
    most = _PARTS // padded(group, 1)
    _mix[(batch * groups, triton.cdiv(dim, _CHANNELS))](
        outs, parts, lses.contiguous(), sink_logits, value_sum, v, each(count), out, covered,
        *starts[chosen : chosen + 2], parts.shape[1], lses.shape[3], *v.stride()[:2], groups, group, dim,
        min(most, padded(parts.shape[1])), min(most, padded(lses.shape[3])), num_warps=8,
    )  # fmt: skip
    return out, covered


def attention_with_mean_refuses(q, segments, scale, chosen, lses, sink_logits, value_sum, v, count):
    (batch, groups, both, dim), group = q.shape, q.shape[2] // 2
    if both % 2 or not q.is_contiguous() or not value_sum.is_contiguous() or v.stride(3) != 1:
        return "takes as many approximate queries as others, and the channels of a row side by side"
    given = [x for x in (lses, value_sum, v, count, sink_logits) if x is not None]
    return (
        unfit_shape(lses, batch, groups, group, None)
        or unfit_numbers(count, batch)
        or unfit_shape(value_sum, batch, groups, 1, dim)
        or unfit_shape(v, batch, groups, 1, dim)
        or unfit_shape(sink_logits, groups * group)
        or unfit(*given)
        or segment_attention_refuses(q.view(batch, -1, 1, dim), segments, scale)
    )


@triton.jit
def _sum_of_two(one, other):
    """Return the logarithm of exp(one) + exp(other); minus infinity counts as nothing."""
    shift = finite(tl.maximum(one, other))
    return shift + tl.log(tl.exp(one - shift) + tl.exp(other - shift))


@triton.jit(do_not_specialize=["first", "end", "parts", "blocks"])
def _mix(
    outs, lses, middle, sinks, sums, added, counts, out, covered, first, end, parts, blocks, vb: tl.int64,
    vg: tl.int64, GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Mix the mean of all values into some channels of one group's query heads. `outs` and `lses`
    hold attention and its log-sum-exp over each of the `parts` of the tokens that are read, for
    HEADS queries and as many approximate ones of each group. The parts from `first` up to `end` are
    of tokens that were chosen among more, and `middle` has the log-sum-exps of `blocks` blocks of
    all those. `counts` says how many values there are."""
    this = program_at(0)
    channel = tl.program_id(1) * _CHANNELS + tl.arange(0, _CHANNELS)
    sequence = this // GROUPS
    group = this % GROUPS
    head = tl.arange(0, padded(HEADS, 1))
    part = tl.arange(0, PARTS)
    mine, of_head, real = head < HEADS, this * HEADS + head, channel < DIM
    exact = 2 * this * HEADS + head
    approximate = exact + HEADS
    own = joined(lses, exact, mine, parts, 0, 0, PARTS)
    read = joined(lses, approximate, mine, parts, 0, 0, PARTS)
    always = joined(lses, approximate, mine, parts, first, end, PARTS)
    every = _sum_of_two(always, joined(middle, of_head, mine, blocks, 0, 0, BLOCKS))
    if sinks is not None:  # each is a token without a value that is always read
        sink = load_wide(sinks + group * HEADS + head, mine)
        own, read, every = _sum_of_two(own, sink), _sum_of_two(read, sink), _sum_of_two(every, sink)
    share = tl.exp(tl.minimum(read - every, 0.0))
    if tl.program_id(1) == 0:
        tl.store(covered + of_head, share, mask=mine)
    mixed = tl.zeros([head.shape[0], _CHANNELS], tl.float32)
    for start in range(0, parts, PARTS):
        at, there = exact[:, None] * parts + start + part, mine[:, None] & (start + part < parts)
        lse = load_logits(lses + at, there)
        weight = tl.exp(lse - own[:, None])
        inside = there[:, :, None] & real[None, None, :]
        rows = load(outs + at[:, :, None] * DIM + channel[None, None, :], inside)
        rows = tl.where(lse[:, :, None] == float("-inf"), 0.0, rows)  # nobody writes an empty part
        mixed += tl.sum(rows * weight[:, :, None], 1)
    value = load_wide(added + sequence * vb + group * vg + channel, real)
    total = load_wide(sums + this * DIM + channel, real) + value
    tl.store(sums + this * DIM + channel, total, mask=real)
    mean = (total / number_of(counts, sequence, 0).to(tl.float32))[None, :]
    whole = mean + (mixed - mean) * share[:, None]
    tl.store(out + of_head[:, None] * DIM + channel, whole, mask=mine[:, None] & real)
