"""Rebuilds low-rank keys and rotates them in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import (
    head_rows,
    lengths_of,
    load,
    located,
    located_angles,
    number_of,
    padded,
    product,
    program_at,
    row_places,
    unfit,
    unfit_floats,
    unfit_heads,
    unfit_shape,
)
from kernels.gpu.copy import NEW_ALONE
from kernels.ragged import Ragged, filled, first_of

_BLOCK = tl.constexpr(64)  # keys
_RANKS = tl.constexpr(32)  # ranks that are taken at once


def rebuild_keys(
    u: Tensor | Ragged, basis: Tensor | Ragged, chunks: Tensor | Ragged, size: int, cos: Tensor | Ragged,
    sin: Tensor | Ragged, out: Tensor | None = None,
) -> Tensor | Ragged:  # fmt: skip
    """Rebuild the keys of chunks [B G K] of `size` tokens, [B G K * size D], from their low-rank
    factors u [B S r] and basis [B G r D], and rotate them by cos and sin, as kernels/reference.py
    defines it. Rows of u are not copied."""
    (groups, rank, dim), numbers = first_of(basis).shape[1:], filled(chunks).contiguous()
    batch, (count, half) = len(numbers), (numbers.shape[2] * size, cos.shape[-1] // 2)
    out = first_of(u).new_empty((batch, groups, count, dim))
    if count:
        _rebuild[(triton.cdiv(count, _BLOCK), batch * groups)](
            located(u),
            located(basis if isinstance(basis, Ragged) else basis.contiguous()),
            numbers,
            located_angles(cos, batch),
            located_angles(sin, batch),
            out,
            lengths_of(chunks),
            count,
            size,
            groups,
            rank,
            dim,
            half,
            num_stages=min(triton.cdiv(rank, _RANKS), 5 if out.element_size() == 2 else 3),
        )
    return Ragged.filled_up(out, chunks.sizes * size) if isinstance(chunks, Ragged) else out


def rebuild_keys_refuses(u, basis, chunks, size, cos, sin, out=None):
    if out is not None:
        return NEW_ALONE
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
def _columns(basis, rank, first, WIDTH: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr):
    """Load WIDTH channels of the rows `rank` of the basis, from channel `first` on."""
    channel = tl.arange(0, padded(WIDTH))
    there = (rank < RANK)[:, None] & (channel < WIDTH)
    return load(basis + rank[:, None] * DIM + first + channel, there)


@triton.jit(do_not_specialize=["count"])
def _rebuild(
    u, basis, chunks, cos, sin, out, counts, count, SIZE: tl.constexpr, GROUPS: tl.constexpr, RANK: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rebuild a block of one head's keys, SIZE for each chunk, and rotate channel i with i + HALF;
    channels from 2 * HALF on stay as they are.

    For several sequences, `counts` says how many chunks each wants."""
    REST: tl.constexpr = DIM - 2 * HALF
    this = program_at(1)
    sequence = this // GROUPS
    place, channel = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK), tl.arange(0, padded(HALF))
    end = number_of(counts, sequence, count // SIZE) * SIZE
    nothing = False if counts is None else tl.program_id(0) * _BLOCK >= end
    if nothing:  # a free slot of a batch has no whole basis that could be read
        return
    live = place < end
    chunk = load(chunks + this * (count // SIZE) + place // SIZE, live).to(tl.int64)
    position = chunk * SIZE + place % SIZE
    of_head, _ = head_rows(basis, sequence, this % GROUPS)
    rows, us = row_places(u, sequence)
    turns, cs = row_places(cos, sequence)
    tilts, ss = row_places(sin, sequence)
    there = live[:, None] & (channel < HALF)
    # early: they arrive during products
    c = load(turns + position[:, None] * cs + channel, there)
    s = load(tilts + position[:, None] * ss + channel, there)
    lower = tl.zeros(there.shape, tl.float32)
    upper = tl.zeros(there.shape, tl.float32)
    still = tl.zeros([_BLOCK, padded(REST)], tl.float32)
    for start in range(0, RANK, _RANKS):
        rank = start + tl.arange(0, _RANKS)
        left = load(rows + position[:, None] * us + rank, live[:, None] & (rank < RANK))
        lower += product(left, _columns(of_head, rank, 0, HALF, RANK, DIM))
        upper += product(left, _columns(of_head, rank, HALF, HALF, RANK, DIM))
        if REST:
            still += product(left, _columns(of_head, rank, 2 * HALF, REST, RANK, DIM))
    c, s = c.to(tl.float32), s.to(tl.float32)
    to = out + (this * count + place)[:, None] * DIM
    tl.store(to + channel, lower * c - upper * s, mask=there)
    tl.store(to + HALF + channel, upper * c + lower * s, mask=there)
    if REST:
        rest = tl.arange(0, padded(REST))
        tl.store(to + 2 * HALF + rest, still, mask=live[:, None] & (rest < REST))
