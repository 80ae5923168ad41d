"""Rebuilds low-rank keys and rotates them in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import padded, product, unfit, unfit_floats, unfit_heads

_BLOCK = 64  # keys
_RANKS = 32  # ranks that are taken at once


def rebuild_keys(u: Tensor, basis: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rebuild keys from their low-rank factors and rotate them, as kernels/reference.py defines it, without copying
    rows of u."""
    batch, groups, rank, dim = basis.shape
    count, half = positions.shape[2], cos.shape[1] // 2
    out = u.new_empty((batch, groups, count, dim))
    if count:
        _rebuild[(triton.cdiv(count, _BLOCK), batch * groups)](
            u, basis.contiguous(), positions.contiguous(), cos, sin, out, *u.stride()[:2], cos.stride(0), sin.stride(0),
            count, groups, rank, dim, half, padded(half), padded(dim - 2 * half), _BLOCK, _RANKS, num_warps=4,
        )  # fmt: skip
    return out


def rebuild_keys_refuses(u: Tensor, basis: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    if any(x.stride(-1) != 1 for x in (u, cos, sin)):
        return "needs the entries of a row side by side"
    return unfit_heads(basis) or unfit_floats(u, basis) or unfit_floats(cos, sin) or unfit(positions)


@triton.jit
def _channels(u, basis, rows, live, first, WIDTH: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr,
              DIM: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Return WIDTH channels of the keys before rotation, from `first` on."""
    channel = tl.arange(0, WIDE)
    keys = tl.zeros([rows.shape[0], WIDE], tl.float32)
    for start in range(0, RANK, STEP):
        rank = start + tl.arange(0, STEP)
        left = tl.load(u + rows[:, None] + rank, mask=live[:, None] & (rank < RANK), other=0.0)
        there = (rank < RANK)[:, None] & (channel < WIDTH)
        right = tl.load(basis + rank[:, None] * DIM + first + channel, mask=there, other=0.0)
        keys += product(left, right)
    return keys


@triton.jit(do_not_specialize=["count"])
def _rebuild(
    u, basis, positions, cos, sin, out, ub: tl.int64, us: tl.int64, cs: tl.int64, ss: tl.int64, count,
    GROUPS: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
    REST_WIDE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Rebuild a block of keys and rotate channel i with i + HALF; channels from 2 * HALF on stay as they are."""
    this = tl.program_id(1).to(tl.int64)
    place, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    live = place < count
    position = tl.load(positions + this * count + place, mask=live, other=0).to(tl.int64)
    rows, of_head = this // GROUPS * ub + position * us, basis + this * RANK * DIM
    lower = _channels(u, of_head, rows, live, 0, HALF, WIDE, RANK, DIM, STEP)
    upper = _channels(u, of_head, rows, live, HALF, HALF, WIDE, RANK, DIM, STEP)
    there = live[:, None] & (channel < HALF)
    c = tl.load(cos + position[:, None] * cs + channel, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin + position[:, None] * ss + channel, mask=there, other=0.0).to(tl.float32)
    to = out + (this * count + place)[:, None] * DIM
    tl.store(to + channel, lower * c - upper * s, mask=there)
    tl.store(to + HALF + channel, upper * c + lower * s, mask=there)
    if DIM > 2 * HALF:
        still, rest = tl.arange(0, REST_WIDE), DIM - 2 * HALF
        unturned = _channels(u, of_head, rows, live, 2 * HALF, rest, REST_WIDE, RANK, DIM, STEP)
        tl.store(to + 2 * HALF + still, unturned, mask=live[:, None] & (still < rest))
