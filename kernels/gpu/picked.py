"""Picks the channels that a query reads, by how many others are larger."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import (
    known,
    load_wide,
    number_of,
    padded,
    program_at,
    unfit_floats,
    unfit_group,
    unfit_heads,
)
from kernels.per_sequence import PerSequence, most_of
from kernels.picked import LEAST

_LEAST = tl.constexpr(LEAST)


def pick_channels(
    q: Tensor, r: int | PerSequence, scale: float, spread: bool, facing: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Find the r channels in which the query heads of each group are largest, as kernels/picked.py
    defines it: q [B G g D] -> channels [B G r], q in them times `scale` [B G g r], and with
    `spread` q followed by q that is zero in all other channels [B G 2g D]. `facing`: add D to the
    number of a channel in which the group's sum of q is not positive. Of equal channels the first
    is taken."""
    batch, groups, heads, dim = q.shape
    counts, most = known(r, q.device)
    channels = torch.empty((batch, groups, most), dtype=torch.int64, device=q.device)
    picked = q.new_empty((batch, groups, heads, most))
    whole = q.new_empty((batch, groups, 2 * heads, dim)) if spread else None
    _pick[(batch * groups,)](
        q.contiguous(), counts, channels, picked, whole, scale, most, groups, heads, dim, facing,
        num_warps=4 if dim <= 128 else 8,
    )  # fmt: skip
    return channels, picked, whole


def pick_channels_refuses(q, r, *_):
    if most_of(r) > q.shape[3]:
        return "leaves the error for too large a count to torch"
    return unfit_heads(q) or unfit_floats(q) or unfit_group(q.shape[2])


@triton.jit(do_not_specialize=["most"])
def _pick(
    q, counts, channels, picked, whole, scale, most, GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    FACING: tl.constexpr,
):  # fmt: skip
    """Pick the channels of one group of query heads: those that fewer than the wanted number of
    others exceed. For several sequences, `counts` may say how many channels each wants, up to
    `most`."""
    this = program_at(0)
    head, channel = tl.arange(0, padded(HEADS, 1))[:, None], tl.arange(0, padded(DIM))
    there = (head < HEADS) & (channel < DIM)
    at = (this * HEADS + head) * DIM + channel
    query = load_wide(q + at, there)
    mass = tl.sum(tl.abs(query), 0)
    # NaN is largest, as in torch: every channel has its own rank
    mass = tl.where(mass == mass, mass, float("inf"))
    mass = tl.where(channel < DIM, mass, -1.0)
    mine, others = mass[:, None], mass[None, :]
    before = (others > mine) | ((others == mine) & (channel[None, :] < channel[:, None]))
    rank = tl.sum(before.to(tl.int32), 1)
    count = number_of(counts, this // GROUPS, most)
    taken = (rank < count) & (channel < DIM)
    kept = tl.where(taken, tl.abs(query), 0.0)
    share = tl.sum(kept, 1) / tl.maximum(tl.sum(tl.abs(query), 1), _LEAST)
    value = query / tl.sqrt(tl.maximum(share, _LEAST))[:, None]
    number = channel.to(tl.int64)
    if FACING:
        number += tl.where(tl.sum(query, 0) <= 0, DIM, 0)
    tl.store(channels + this * most + rank, number, mask=taken)
    tl.store(picked + (this * HEADS + head) * most + rank, value * scale, mask=there & taken)
    behind = (channel >= count) & (channel < most)
    tl.store(channels + this * most + channel, tl.zeros_like(number), mask=behind)
    nothing = tl.zeros_like(value)
    tl.store(picked + (this * HEADS + head) * most + channel, nothing, mask=(head < HEADS) & behind)
    if whole is not None:
        to = whole + at + this * HEADS * DIM  # each group's queries, then these
        tl.store(to, query, mask=there)
        tl.store(to + HEADS * DIM, tl.where(taken, value, 0.0), mask=there)
