"""Defines in plain torch what a query picks: the channels in which it is largest."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import ops
from kernels.per_sequence import PerSequence
from kernels.ragged import Ragged, filled
from kernels.reference import without_missing

LEAST = 1e-20  # of what is divided by


def pick_channels(
    q: Tensor, r: int | PerSequence, scale: float, spread: bool, facing: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Find the r channels with the largest sum of |q| over the g query heads of a group. Return
    them [B G r], and q in them [B G g r] times `scale`, divided so that the logits of different
    query heads are comparable. q [B G g D]. SparQ (arXiv 2312.04985)

    `spread`, if all sequences want equally many: also return [B G 2g D], the queries as they were
    and behind them these unscaled, zero in the other channels; else None. `facing`: add D to the
    number of a channel in which the group's sum of q is not positive. If a sequence wants fewer
    channels than another, further ones follow its own, in which its queries are zero."""
    mass = q.float().abs()
    best = ops.top_k(mass.sum(2), r)
    channels = filled(best)
    index = channels.unsqueeze(2).expand(*q.shape[:3], -1)
    picked = q.gather(-1, index).float()
    if isinstance(best, Ragged):
        picked = without_missing(picked, best.counts, 0.0)
    share = picked.abs().sum(-1, keepdim=True) / mass.sum(-1, keepdim=True).clamp(min=LEAST)
    picked = picked / share.clamp(min=LEAST).sqrt()
    whole = None
    if spread:
        whole = torch.cat([q, torch.zeros_like(q).scatter_(-1, index, picked.to(q.dtype))], 2)
    if facing:
        channels = torch.where(q.sum(2).gather(-1, channels) <= 0, channels + q.shape[3], channels)
    return channels, (picked * scale).to(q.dtype), whole
