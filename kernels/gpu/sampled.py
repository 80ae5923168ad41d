"""Draws tokens at random, and weighs them so that they stand for those that were not drawn."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import load, load_wide, padded, program_at, unfit, unfit_shape
from kernels.sampled import MIX, STEP, Sample, signed

_STEP = tl.constexpr(signed(STEP))
_FIRST, _SECOND = (tl.constexpr(signed(factor)) for factor in MIX)
_DRAWS = tl.constexpr(256)  # that a program makes
_MOST = 4096  # draws that a program weighs
_COMPARED = tl.constexpr(16)  # tokens with which all draws are compared at a time


def uniform_draws(position: Tensor, key: int, groups: int, count: int, among: int) -> Tensor:
    """Draw numbers below `among` for each of `groups` KV heads, as kernels/sampled.py defines it.
    -> [G count]"""
    out = torch.empty((groups, count), dtype=torch.int64, device=position.device)
    _draw[(triton.cdiv(count, _DRAWS.value), groups)](position, out, key, count, among)
    return out


def uniform_draws_refuses(position, key, groups, count, among):
    return unfit(position)


def sampled_weights(
    logits: Tensor, lse: Tensor, always: Tensor, rows: Tensor, heavy: int, sample: Sample
) -> tuple[Tensor, Tensor]:
    """Return log-weights of the tokens `rows` [B C K], and how many draws each list needs, [B C 1],
    as kernels/sampled.py defines it."""
    batch, lists, count = rows.shape
    out = logits.new_empty(rows.shape)
    wanted = logits.new_empty((batch, lists, 1))
    among, least, epsilon, quantile, scale = sample
    _weigh[(batch * lists,)](
        logits.contiguous(), lse.contiguous(), always.contiguous(), rows.contiguous(), out, wanted,
        logits.shape[3], count, heavy, among, min(least, count - heavy), least, epsilon, quantile, scale,
        logits.shape[2], padded(count - heavy), num_warps=8,
    )  # fmt: skip
    return out, wanted


def sampled_weights_refuses(logits, lse, always, rows, heavy, sample):
    heads = logits.shape[:3]
    if {logits.dtype, lse.dtype, always.dtype} != {torch.float32}:
        return f"takes float32, got {logits.dtype}"
    if rows.shape[2] - heavy > _MOST:
        return f"weighs up to {_MOST} draws, got {rows.shape[2] - heavy}"
    sides = unfit_shape(lse, *heads) or unfit_shape(always, *heads)
    return sides or unfit_shape(rows, *heads[:2], None) or unfit(logits, lse, always, rows)


@triton.jit
def _mixed(x):
    """Return what the mixing function of SplitMix64 makes of x (int64, read as 64 bits)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["key", "count", "among"])
def _draw(position, out, key: tl.int64, count, among):
    """Draw some numbers below `among` for one KV head."""
    head, at = program_at(1), tl.program_id(0) * _DRAWS + tl.arange(0, _DRAWS)
    stream = _mixed(tl.full([_DRAWS], 0, tl.int64) + key)
    stream = _mixed(stream + tl.load(position) * _STEP)
    place = (head << 32) + at + 1
    bits = (_mixed(stream + place * _STEP) >> 32) & 0x7FFFFFFF
    tl.store(out + head * count + at, (bits * among) >> 31, mask=at < count)


@triton.jit
def _deviation(logits, row, fewest, known, scale, lse, counted, among, epsilon, quantile):
    """Return how many draws one query head needs: `row` are the tokens drawn, of which the first
    `fewest` estimate it, and of these those count as more than 0 that are `counted`."""
    at = tl.arange(0, row.shape[0])
    term = tl.where(counted, tl.exp(load(logits + row, counted) * scale - lse), 0.0)
    mean = tl.sum(term, 0) / fewest
    off = tl.where(at < fewest, term - mean, 0.0)
    deviation = tl.sqrt(tl.sum(off * off, 0) / (fewest - 1))
    ratio = quantile * among * deviation / (epsilon * (known + among * mean))
    return tl.ceil(ratio * ratio)


@triton.jit(do_not_specialize=["count", "heavy", "among", "fewest", "least"])
def _weigh(
    logits, lses, always, rows, out, wanted, stored, count, heavy, among, fewest, least, epsilon, quantile, scale,
    HEADS: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """Weigh the tokens that were drawn for one list, whose first `heavy` rows were not drawn. The first
    `fewest` draws estimate how many are needed, `least` at least."""
    this, place = program_at(0), tl.arange(0, DRAWS)
    rows += this * count
    draws, drawn = count - heavy, place < count - heavy
    row = tl.load(rows + heavy + place, mask=drawn, other=-1)
    first = tl.full([DRAWS], 1 << 30, tl.int32)
    for start in range(0, count, _COMPARED):
        at = start + tl.arange(0, _COMPARED)
        other = tl.load(rows + at, mask=at < count, other=-2)
        same = tl.where(row[:, None] == other[None, :], at[None, :], 1 << 30)
        first = tl.minimum(first, tl.min(same, 1))
    exact = first < heavy
    counted = (place < fewest) & ~exact
    needed = tl.full([], 0.0, tl.float32) + least
    for head in range(HEADS):
        of_head = this * HEADS + head
        lse = tl.load(lses + of_head)
        known = tl.exp(tl.load(always + of_head) - lse)
        for start in range(0, heavy, DRAWS):
            at = start + place
            one = load(rows + at, at < heavy)
            weight = tl.exp(load_wide(logits + of_head * stored + one, at < heavy) * scale - lse)
            known += tl.sum(tl.where(at < heavy, weight, 0.0), 0)
        draws_of_head = _deviation(
            logits + of_head * stored,
            row,
            fewest,
            known,
            scale,
            lse,
            counted,
            among,
            epsilon,
            quantile,
        )
        needed = tl.maximum(needed, draws_of_head)
    tl.store(wanted + this, needed)
    size = tl.minimum(needed, draws.to(tl.float32))
    times = tl.zeros([DRAWS], tl.float32)
    for start in range(0, draws, _COMPARED):
        at = start + tl.arange(0, _COMPARED)
        other = tl.load(rows + heavy + at, mask=at < size, other=-2)
        times += tl.sum((row[:, None] == other[None, :]).to(tl.float32), 1)
    read = (place < size) & ~exact & (first - heavy == place)
    added = tl.where(read, tl.log(times * (among / size)), float("-inf"))
    to = out + this * count
    tl.store(to + heavy + place, added, mask=drawn)
    for start in range(0, heavy, DRAWS):
        tl.store(to + start + place, tl.zeros([DRAWS], tl.float32), mask=start + place < heavy)
