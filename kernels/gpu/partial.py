"""Reduces queries and new keys to the columns of InfiniGen's partial keys, all in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import common
from kernels.gpu.common import (
    each,
    head_rows,
    load_wide,
    located,
    number_of,
    padded,
    program_at,
    rounded,
)
from kernels.gpu.rope import rotate_refuses
from kernels.partial import Guess, NewPartial
from kernels.ragged import first_of


def partial_products(guess: Guess | None, new: NewPartial | None) -> Tensor | None:
    """Rotate the queries of `guess` and multiply them with its basis, and write the key of `new`
    times its own basis to its row, as kernels/partial.py defines it. -> [B G g W], or None"""
    if guess is None and new is None:
        return None
    q, cos, sin, basis, scale = guess or Guess(new.k, new.k, new.k, new.basis, 1.0)  # type: ignore[union-attr]
    k, own, rows, at = new or NewPartial(q, basis, q, q)  # which is not read
    (batch, heads, _, dim), (_, groups, _, width) = q.shape, basis.shape
    heads, held = heads * (guess is not None), k.shape[1] * (new is not None)
    by_channel = first_of(rows).stride(3) != 1
    out = q.new_empty((batch, groups, heads // groups, width)) if heads else None
    _products[(heads + held, batch)](
        q, cos, sin, basis, out, k, own, located(rows.mT if by_channel else rows), each(at), scale, *q.stride()[:2],
        *(angle.stride(0) if len(angle) > 1 else 0 for angle in (cos, sin)), *k.stride()[:2], heads, groups,
        cos.shape[-1] // 2, width, held, own.shape[3], by_channel, dim,
        enable_fp_fusion=False,  # fusing would skip the rounding of a product
    )  # fmt: skip
    return out


def partial_products_refuses(guess, new):
    for x, basis in [(part[0], part.basis) for part in (guess, new) if part is not None]:
        if reason := (
            common.unfit_shape(x, len(basis), None, 1, basis.shape[2])
            or common.unfit_sharing(x.shape[1], basis.shape[1])
            or common.unfit_heads(x)
            or common.unfit_floats(x, basis)
            or (None if basis.is_contiguous() else "takes a basis whose columns lie side by side")
        ):
            return reason
    if guess is not None and (reason := rotate_refuses(*guess[:3])):
        return reason
    if guess is not None and new is not None and guess.q.shape[::3] != new.k.shape[::3]:
        return "takes queries and keys of as many sequences, equally wide"
    if new is None:
        return None
    first, held = first_of(new.rows), new.basis.shape[:2]
    if 1 not in (first.stride(3), first.stride(2)):
        return "needs the channels of a row, or the rows of a channel, side by side"
    sides = common.unfit_shape(new.k, *held, 1, None) or common.unfit_shape(
        new.rows, *held, None, None
    )
    return sides or common.unfit_numbers(new.at, held[0]) or common.unfit_floats(new.k, first)


@triton.jit
def _columns_of(x, basis, which, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Multiply a vector x [WIDE], in fp32, with number `which` of the matrices `basis`. Return the
    product, and whether a column of the matrix has an entry that is not zero."""
    channel, column = tl.arange(0, padded(DIM, 1)), tl.arange(0, padded(WIDTH, 1))
    at = basis + (which * DIM + channel[:, None]) * WIDTH + column
    there = (channel < DIM)[:, None] & (column < WIDTH)
    matrix = load_wide(at, there)
    return tl.sum(x[:, None] * matrix, 0), tl.max(tl.abs(matrix), 0) > 0


@triton.jit
def _products(
    q, cos, sin, basis, out, k, own, rows, at, scale, qb: tl.int64, qh: tl.int64, cb: tl.int64, sb: tl.int64,
    kb: tl.int64, kg: tl.int64, HEADS: tl.constexpr, BASES: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr, OWN_WIDTH: tl.constexpr, BY_CHANNEL: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Rotate one query head and multiply it with its basis; programs after those of the HEADS query
    heads multiply the new key of a KV head with its own basis and write it to its row, which `at`
    names. Of several
    sequences' bases, columns of zeros are not written: a sequence's rows may have fewer.
    BY_CHANNEL: the rows of a channel lie side by side, and channels are as far apart as
    rows else are."""
    head, batch = tl.program_id(0), program_at(1)
    channel = tl.arange(0, padded(DIM, 1))
    if head < HEADS:
        if HEADS > 0:
            turns, lower = channel < 2 * HALF, channel < HALF
            other = tl.where(lower, channel + HALF, channel - HALF)
            this = q + batch * qb + head * qh
            x = load_wide(this + channel, channel < DIM)
            y = load_wide(this + other, turns)
            c = load_wide(cos + batch * cb + channel, turns)
            s = load_wide(sin + batch * sb + channel, turns)
            tilted = rounded(y * s, q)
            turned = rounded(rounded(x * c, q) + tl.where(lower, -tilted, tilted), q)
            x, which = tl.where(turns, turned, x), batch * BASES + head // (HEADS // BASES)
            product, _ = _columns_of(x, basis, which, DIM, WIDTH)
            column = tl.arange(0, padded(WIDTH, 1))
            tl.store(
                out + (batch * HEADS + head) * WIDTH + column, product * scale, mask=column < WIDTH
            )
    elif GROUPS > 0:
        group = head - HEADS
        x = load_wide(k + batch * kb + group * kg + channel, channel < DIM)
        narrow, there = _columns_of(x, own, batch * GROUPS + group, DIM, OWN_WIDTH)
        first, apart = head_rows(rows, batch, group)
        row, column = number_of(at, batch, 0), tl.arange(0, padded(OWN_WIDTH, 1))
        to = first + column * apart + row if BY_CHANNEL else first + row * apart + column
        tl.store(to, narrow, mask=there if rows.listed else column < OWN_WIDTH)
