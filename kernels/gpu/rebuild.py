"""Rebuilds low-rank keys and rotates them in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import (
    head_rows,
    located,
    padded,
    product,
    row_places,
    unfit,
    unfit_floats,
    unfit_heads,
    unfit_shape,
)
from kernels.ragged import Ragged, filled, first_of

_BLOCK = 64  # keys
_RANKS = 32  # ranks that are taken at once


def rebuild_keys(
    u: Tensor | Ragged, basis: Tensor | Ragged, positions: Tensor | Ragged, cos: Tensor | Ragged, sin: Tensor | Ragged
) -> Tensor | Ragged:
    """Rebuild keys [B G K D] at `positions` [B G K] from their low-rank factors u [B S r] and basis
    [B G r D], and rotate them by cos and sin, as kernels/reference.py defines it. Rows of u are not
    copied."""
    (groups, rank, dim), places = first_of(basis).shape[1:], filled(positions).contiguous()
    batch = len(places)
    count, half = places.shape[2], cos.shape[-1] // 2
    counts = positions.counts if isinstance(positions, Ragged) else None
    out = first_of(u).new_empty((batch, groups, count, dim))
    (rows, of_u, _), (bases, of_basis, aligned), (turns, of_cos, _), (tilts, of_sin, _) = (
        located(x) for x in (u, basis, cos, sin)
    )
    if count:
        _rebuild[(triton.cdiv(count, _BLOCK), batch * groups)](
            rows, bases.contiguous(), places, turns, tilts, out, of_u, of_basis, of_cos, of_sin, counts,
            *rows.stride()[:2], turns.stride(-2), tilts.stride(-2), count, groups, rank, dim, half, padded(half),
            padded(dim - 2 * half), _BLOCK, _RANKS, aligned, num_warps=4,
        )  # fmt: skip
    return Ragged.filled_up(out, positions.sizes) if isinstance(positions, Ragged) else out


def rebuild_keys_refuses(
    u: Tensor | Ragged, basis: Tensor | Ragged, positions: Tensor | Ragged, cos: Tensor | Ragged, sin: Tensor | Ragged
) -> str | None:
    rows, bases, turns, tilts = map(first_of, (u, basis, cos, sin))
    if any(x.stride(-1) != 1 for x in (rows, turns, tilts)):
        return "needs the entries of a row side by side"
    if isinstance(basis, Ragged) and not basis.dense:
        return "needs the basis of a sequence without gaps"
    (batch, groups, _), (_, _, rank, dim) = positions.shape, bases.shape
    if turns.shape[-1] > dim or turns.shape[-2:] != tilts.shape[-2:]:
        return f"takes cos and sin of one shape and up to {dim} channels, got {list(cos.shape)} and {list(sin.shape)}"
    if reason := unfit_shape(u, batch, None, rank) or unfit_shape(basis, batch, groups, None, dim):
        return reason
    return unfit_heads(bases) or unfit_floats(rows, bases) or unfit_floats(turns, tilts) or unfit(filled(positions))


@triton.jit
def _channels(u, basis, rows, live, first, WIDTH: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr,
              DIM: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Return WIDTH channels, from channel `first` on, of a block of keys before their rotation: the
    product of `rows` of u with those columns of the basis."""
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
    u, basis, positions, cos, sin, out, of_u, of_basis, of_cos, of_sin, counts, ub: tl.int64, us: tl.int64,
    cs: tl.int64, ss: tl.int64, count, GROUPS: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    WIDE: tl.constexpr, REST_WIDE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rebuild a block of one head's keys and rotate channel i with i + HALF; channels from 2 * HALF
    on stay as they are.

    For several sequences, `of_u`, `of_basis`, `of_cos` and `of_sin` are tables of the addresses of
    each one's tensors, and `counts` says how many keys each wants."""
    this = tl.program_id(1).to(tl.int64)
    sequence = this // GROUPS
    place, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    live = place < count
    if counts is not None:
        live = place < tl.load(counts + sequence)
    position = tl.load(positions + this * count + place, mask=live, other=0).to(tl.int64)
    of_head, _ = head_rows(basis, of_basis, sequence, this % GROUPS, GROUPS * RANK * DIM, RANK * DIM, DIM, ALIGNED)
    u, us = row_places(u, of_u, sequence, ub, us)
    cos, cs = row_places(cos, of_cos, sequence, 0, cs)
    sin, ss = row_places(sin, of_sin, sequence, 0, ss)
    rows = position * us
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
