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
    u: Tensor | Ragged, basis: Tensor | Ragged, chunks: Tensor | Ragged, size: int, cos: Tensor | Ragged,
    sin: Tensor | Ragged,
) -> Tensor | Ragged:  # fmt: skip
    """Rebuild the keys of chunks [B G K] of `size` tokens, [B G K * size D], from their low-rank
    factors u [B S r] and basis [B G r D], and rotate them by cos and sin, as kernels/reference.py
    defines it. Rows of u are not copied."""
    (groups, rank, dim), numbers = first_of(basis).shape[1:], filled(chunks).contiguous()
    batch, (count, half) = len(numbers), (numbers.shape[2] * size, cos.shape[-1] // 2)
    counts = chunks.counts if isinstance(chunks, Ragged) else None
    out = first_of(u).new_empty((batch, groups, count, dim))
    (rows, of_u, _), (bases, of_basis, aligned), (turns, of_cos, _), (tilts, of_sin, _) = (
        located(x) for x in (u, basis, cos, sin)
    )
    if count:
        _rebuild[(triton.cdiv(count, _BLOCK), batch * groups)](
            rows, bases.contiguous(), numbers, turns, tilts, out, of_u, of_basis, of_cos, of_sin, counts,
            *rows.stride()[:2], turns.stride(-2), tilts.stride(-2), count, size, groups, rank, dim, half, padded(half),
            padded(dim - 2 * half), _BLOCK, _RANKS, aligned, num_warps=4,
            num_stages=min(triton.cdiv(rank, _RANKS), 5 if rows.element_size() == 2 else 3),
        )  # fmt: skip
    return Ragged.filled_up(out, chunks.sizes * size) if isinstance(chunks, Ragged) else out


def rebuild_keys_refuses(
    u: Tensor | Ragged, basis: Tensor | Ragged, chunks: Tensor | Ragged, size: int, cos: Tensor | Ragged,
    sin: Tensor | Ragged,
) -> str | None:  # fmt: skip
    rows, bases, turns, tilts = map(first_of, (u, basis, cos, sin))
    if any(x.stride(-1) != 1 for x in (rows, turns, tilts)):
        return "needs the entries of a row side by side"
    if isinstance(basis, Ragged) and not basis.dense:
        return "needs the basis of a sequence without gaps"
    (batch, groups, _), (_, _, rank, dim) = chunks.shape, bases.shape
    if turns.shape[-1] > dim or turns.shape[-2:] != tilts.shape[-2:]:
        return f"takes cos and sin of one shape and up to {dim} channels, got {list(cos.shape)} and {list(sin.shape)}"
    if reason := unfit_shape(u, batch, None, rank) or unfit_shape(basis, batch, groups, None, dim):
        return reason
    return (
        unfit_heads(bases)
        or unfit_floats(rows, bases)
        or unfit_floats(turns, tilts)
        or unfit(filled(chunks))
    )


@triton.jit
def _columns(
    basis,
    rank,
    first,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    RANK: tl.constexpr,
    DIM: tl.constexpr,
):
    """Load WIDTH channels of the rows `rank` of the basis, from channel `first` on."""
    channel = tl.arange(0, WIDE)
    there = (rank < RANK)[:, None] & (channel < WIDTH)
    return tl.load(basis + rank[:, None] * DIM + first + channel, mask=there, other=0.0)


@triton.jit(do_not_specialize=["count"])
def _rebuild(
    u, basis, chunks, cos, sin, out, of_u, of_basis, of_cos, of_sin, counts, ub: tl.int64, us: tl.int64, cs: tl.int64,
    ss: tl.int64, count, SIZE: tl.constexpr, GROUPS: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, WIDE: tl.constexpr, REST_WIDE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rebuild a block of one head's keys, SIZE for each chunk, and rotate channel i with i + HALF;
    channels from 2 * HALF on stay as they are.

    For several sequences, `of_u`, `of_basis`, `of_cos` and `of_sin` are tables of the addresses of
    each one's tensors, and `counts` says how many chunks each wants."""
    this = tl.program_id(1).to(tl.int64)
    sequence = this // GROUPS
    place, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    end = count if counts is None else tl.load(counts + sequence).to(tl.int32) * SIZE
    nothing = False if counts is None else tl.program_id(0) * BLOCK >= end
    if nothing:  # a free slot of a batch has no whole basis that could be read
        return
    live = place < end
    chunk = tl.load(chunks + this * (count // SIZE) + place // SIZE, mask=live, other=0).to(
        tl.int64
    )
    position = chunk * SIZE + place % SIZE
    of_head, _ = head_rows(
        basis, of_basis, sequence, this % GROUPS, GROUPS * RANK * DIM, RANK * DIM, DIM, ALIGNED
    )
    u, us = row_places(u, of_u, sequence, ub, us)
    cos, cs = row_places(cos, of_cos, sequence, 0, cs)
    sin, ss = row_places(sin, of_sin, sequence, 0, ss)
    there = live[:, None] & (channel < HALF)
    # early: they arrive during products
    c = tl.load(cos + position[:, None] * cs + channel, mask=there, other=0.0)
    s = tl.load(sin + position[:, None] * ss + channel, mask=there, other=0.0)
    lower = tl.zeros([BLOCK, WIDE], tl.float32)
    upper = tl.zeros([BLOCK, WIDE], tl.float32)
    still = tl.zeros([BLOCK, REST_WIDE], tl.float32)
    for start in range(0, RANK, STEP):
        rank = start + tl.arange(0, STEP)
        left = tl.load(
            u + position[:, None] * us + rank, mask=live[:, None] & (rank < RANK), other=0.0
        )
        lower += product(left, _columns(of_head, rank, 0, HALF, WIDE, RANK, DIM))
        upper += product(left, _columns(of_head, rank, HALF, HALF, WIDE, RANK, DIM))
        if DIM > 2 * HALF:
            still += product(
                left, _columns(of_head, rank, 2 * HALF, DIM - 2 * HALF, REST_WIDE, RANK, DIM)
            )
    c, s = c.to(tl.float32), s.to(tl.float32)
    to = out + (this * count + place)[:, None] * DIM
    tl.store(to + channel, lower * c - upper * s, mask=there)
    tl.store(to + HALF + channel, upper * c + lower * s, mask=there)
    if DIM > 2 * HALF:
        rest = tl.arange(0, REST_WIDE)
        tl.store(to + 2 * HALF + rest, still, mask=live[:, None] & (rest < DIM - 2 * HALF))
