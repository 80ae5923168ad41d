"""Defines in plain torch the operations that draw tokens at random, and weigh them so that they stand
for those that were not drawn (vAttention, arXiv 2510.05688).

Draws come from a counter (SplitMix64), so a sequence draws the same alone, in batches, in captured
steps, and wherever its rows lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import ops

STEP, MIX = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # SplitMix64
HEADS = 1 << 32  # draws of a head in a step, more than any sample has


class Sample(NamedTuple):
    """Say what is drawn, and how many draws are needed: from `among` tokens, of which the first
    `least` draws estimate how many give the softmax's denominator with a relative error of at most
    `epsilon`, if a sum is off by no more than `quantile` standard deviations."""

    among: int
    least: int
    epsilon: float
    quantile: float
    scale: float  # of logits


def uniform_draws(position: Tensor, key: int, groups: int, count: int, among: int) -> Tensor:
    """Draw `count` numbers below `among` for each of `groups` KV heads, uniform with replacement,
    [G count]. `position` [1] (int64) and `key`, 64 bits, decide."""
    stream = _mixed(_mixed(torch.full_like(position, key)) + position * signed(STEP))
    heads = torch.arange(groups, device=position.device).unsqueeze(1) * HEADS
    place = heads + torch.arange(1, count + 1, device=position.device)
    bits = _mixed(stream + place * signed(STEP)) >> 32 & 0x7FFFFFFF
    return bits * among >> 31


def sampled_weights(
    logits: Tensor, lse: Tensor, always: Tensor, rows: Tensor, heavy: int, sample: Sample
) -> tuple[Tensor, Tensor]:
    """Return log-weights of the tokens `rows` [B C K], of which the first `heavy` are read as they are
    and the others were drawn, and how many draws each list of them needs, [B C 1].

    Of the draws, as many count as are needed, up to all; a token that was drawn again has a log-weight
    of minus infinity, and the first draw stands for all. logits [B C h M] of all tokens, before the
    factor `scale`; lse, always [B C h]: the log-sum-exp of the whole softmax, and of the tokens that
    are always read."""
    among, least, epsilon, quantile, scale = sample
    logits = logits.gather(3, rows.unsqueeze(2).expand(*logits.shape[:3], -1))
    weights = (logits * scale - lse.unsqueeze(3)).exp()  # [B C h K]
    first = ops.first_places(rows)[..., heavy:] - heavy
    exact = first < 0  # a heavy token was drawn
    known = (always - lse).exp() + weights[..., :heavy].sum(-1)
    base = weights[..., heavy:].masked_fill(exact.unsqueeze(2), 0)[..., :least]
    error = epsilon * (known + among * base.mean(-1))
    wanted = (quantile * among * base.std(-1) / error).square().ceil().clamp(min=least)
    wanted = wanted.amax(2, keepdim=True)
    count = rows.shape[2] - heavy
    size, place = wanted.clamp(max=count), torch.arange(count, device=rows.device)
    counts = (place < size) & ~exact
    times = torch.zeros(first.shape, device=rows.device)
    times.scatter_add_(2, first.clamp(min=0), counts.float())
    added = (times * (among / size)).log().masked_fill(~counts | (first != place), float("-inf"))
    return torch.cat([added.new_zeros(*rows.shape[:2], heavy), added], -1), wanted


def signed(bits: int) -> int:
    """Return the int64 with the last 64 of these bits."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)


def _mixed(x: Tensor) -> Tensor:
    """Return the numbers that the mixing function of SplitMix64 makes of x (int64, read as 64
    bits)."""
    for shift, factor in zip((30, 27), MIX, strict=True):
        x = (x ^ x >> shift & (1 << 64 - shift) - 1) * signed(factor)
    return x ^ x >> 31 & (1 << 33) - 1
