"""Rotates heads by position in one kernel: those of a block, whose keys it may also write to a
cache, or any others."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.block import DecoderBlock
from kernels.gpu import common
from kernels.gpu.common import (
    each,
    head_rows,
    load_wide,
    located,
    located_angles,
    number_of,
    padded,
    program_at,
    rounded,
    row_places,
)
from kernels.ragged import Ragged, first_of

_TURNED = tl.constexpr(16)  # tokens of a head that one program rotates


class NewRows(NamedTuple):
    """Say where the keys and values of new tokens are also written: into one row of a cache."""

    keys: Tensor | Ragged  # [B G S D], or [B*G 1 S D] if every KV head has memory of its own
    values: Tensor | Ragged
    row: Tensor  # [1], [B] or [B*G]


def turned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: DecoderBlock,
    cos: Tensor,
    sin: Tensor,
    batch: int,
    store: NewRows | None,
) -> tuple[Tensor, Tensor]:
    """Norm the heads of q and k if the model does, rotate them (neighbouring channels become halves),
    and reorder them: q [B*T H*D], k, v [B*T G*D] -> q [B H T D], k [B G T D]. If there is a
    `store`, write k and v into it too."""
    tokens, dim = q.shape[0] // batch, block.head_dim
    new_q, new_k = (x.new_empty((batch, x.shape[1] // dim, tokens, dim)) for x in (q, k))
    norms = block.q_norm, block.k_norm, block.eps
    _launch(q, k, v, new_q, new_k, cos, sin, norms, block.neighbours, store)
    return new_q, new_k


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B G T D] by cos and sin, as kernels/rope.py defines it. It runs the kernel that
    rotates a block's queries, without norms."""
    batch, heads, tokens, dim = x.shape
    rows, out = x.transpose(1, 2).reshape(batch * tokens, heads * dim), x.new_empty(x.shape)
    if out.numel():
        _launch(rows, rows, rows, out, out[:, :0], cos, sin)
    return out


def _launch(
    q: Tensor, k: Tensor, v: Tensor, new_q: Tensor, new_k: Tensor, cos: Tensor, sin: Tensor,
    norms: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0), neighbours: bool = False,
    store: NewRows | None = None,
) -> None:  # fmt: skip
    """Rotate q [B*T H*D] into new_q [B H T D], and k into new_k; `norms`: weights for the heads of q
    and of k, and epsilon. `neighbours` and `store`: as in `turned`."""
    (batch, heads, tokens, dim), groups = new_q.shape, new_k.shape[1]
    at_once = min(_TURNED.value, padded(tokens, 1))
    cache: tuple[object, ...] = (None, None, None)  # where new rows go
    if store is not None:
        cache = located(store.keys), located(store.values), each(store.row)
    apart = groups if store is not None and store.keys.shape[1] < groups else 0
    angles = (located(x.expand(batch, tokens, -1)) for x in (cos, sin))
    _turn[(triton.cdiv(tokens, at_once), heads + groups * (1 if store is None else 2), batch)](
        q, k, v, new_q, new_k, *cache, *norms, *angles, q.stride(0), k.stride(0), v.stride(0), tokens,
        apart, heads, groups, dim, cos.shape[2] // 2, at_once, neighbours, num_warps=1 if at_once == 1 else 4,
        enable_fp_fusion=False,  # fusing would skip the rounding of a product
    )  # fmt: skip


def rotate_to(
    x: Tensor, cos: Tensor | Ragged, sin: Tensor | Ragged, at: Tensor, dtype: torch.dtype
) -> Tensor:
    """Rotate rows x [B G T D] to the position `at` of tables of cos and sin [1 C R], in fp32, and
    return them in `dtype`, as kernels/rope.py defines it."""
    batch, groups, tokens, dim = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel():
        angles = (located_angles(part, batch) for part in (cos, sin))
        _turn_to[(triton.cdiv(tokens, _TURNED), groups, batch)](
            x.contiguous(), *angles, each(at), out, tokens, groups, dim, cos.shape[2] // 2,
            enable_fp_fusion=False,  # fusing would skip the rounding of a product
        )  # fmt: skip
    return out


def rotate_to_refuses(x, cos, sin, at, dtype):
    if cos.shape[2] % 2 or cos.shape[2] > x.shape[3] or dtype not in common.DTYPES:
        return (
            f"turns pairs of up to {x.shape[3]} channels of a float, got {cos.shape[2]} of {dtype}"
        )
    sides = common.unfit_shape(cos, len(x) if isinstance(cos, Ragged) else 1, None, None)
    sides = sides or common.unfit_shape(sin, *cos.shape) or common.unfit_numbers(at, len(x))
    return sides or common.unfit_heads(x) or common.unfit_heads(first_of(cos), first_of(sin))


def rotate_refuses(x, cos, sin):
    return unfit_angles(x.shape[0], x.shape[2], x.shape[3], cos, sin) or common.unfit_heads(
        x, cos, sin
    )


def unfit_angles(batch: int, tokens: int, dim: int, cos: Tensor, sin: Tensor) -> str | None:
    """Return why no kernel can rotate heads of `dim` channels by cos and sin [1|B 1|T R], for
    `batch` sequences of `tokens` tokens, or None."""
    if cos.shape[-1] % 2 or cos.shape[-1] > dim:
        return f"turns pairs of up to {dim} channels, got {cos.shape[-1]}"
    for angle in (cos, sin):
        sizes = (
            angle.shape[0] if angle.shape[0] == 1 else batch,
            1 if angle.shape[1] == 1 else tokens,
            cos.shape[-1],
        )
        if reason := common.unfit_shape(angle, *sizes):
            return reason
    return None


@triton.jit
def _times(x, share, norm, at, there):
    """Finish RMSNorm for some channels `at` of heads: return x times `share` (one over the root
    mean square of each row) times the weights `norm`, rounded as torch rounds."""
    gain = load_wide(norm + at, there)
    return rounded(gain * rounded(x * share[:, None], norm), norm)


@triton.jit
def _turn_head(
    x, out, stored, norm, cos, sin, eps, xt, ct, st, live, DIM: tl.constexpr, HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """Rotate some tokens of one head from x to `out`: channel i with i + HALF; channels from 2 *
    HALF on stay as they are. NEIGHBOURS: in x these two are 2i and 2i + 1. With weights `norm`,
    norm them first. A single token may also go to the row at the pointer `stored`."""
    token = tl.arange(0, live.shape[0]).to(tl.int64)[:, None]
    channel = tl.arange(0, padded(HALF, 1))
    still = 2 * HALF + tl.arange(0, padded(DIM - 2 * HALF, 1))
    there, beside = live[:, None] & (channel < HALF), live[:, None] & (still < DIM)
    step: tl.constexpr = 2 if NEIGHBOURS else 1
    apart: tl.constexpr = 1 if NEIGHBOURS else HALF
    first = channel * step
    second = first + apart
    lower = load_wide(x + token * xt + first, there)
    upper = load_wide(x + token * xt + second, there)
    rest = load_wide(x + token * xt + still, beside)
    if norm is not None:
        squares = tl.sum(lower * lower, 1) + tl.sum(upper * upper, 1) + tl.sum(rest * rest, 1)
        share = tl.rsqrt(squares / DIM + eps)
        lower = _times(lower, share, norm, first, channel < HALF)
        upper = _times(upper, share, norm, second, channel < HALF)
        rest = _times(rest, share, norm, still, still < DIM)
    c = load_wide(cos + token * ct + channel, there)
    s = load_wide(sin + token * st + channel, there)
    turned_lower = rounded(lower * c, out) - rounded(upper * s, out)
    c = load_wide(cos + token * ct + HALF + channel, there)
    s = load_wide(sin + token * st + HALF + channel, there)
    turned_upper = rounded(upper * c, out) + rounded(lower * s, out)
    tl.store(out + token * DIM + channel, turned_lower, mask=there)
    tl.store(out + token * DIM + HALF + channel, turned_upper, mask=there)
    tl.store(out + token * DIM + still, rest, mask=beside)
    if stored is not None:
        tl.store(stored + token * DIM + channel, turned_lower, mask=there)
        tl.store(stored + token * DIM + HALF + channel, turned_upper, mask=there)
        tl.store(stored + token * DIM + still, rest, mask=beside)


@triton.jit(do_not_specialize=["tokens"])
def _turn_to(
    x, cos, sin, at, out, tokens, GROUPS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Rotate some rows of one head to one position: channel i with i + HALF; channels from 2 * HALF
    on stay as they are. `at` holds the position."""
    batch, channel = program_at(2), tl.arange(0, padded(DIM, 1))
    token = tl.program_id(0) * _TURNED + tl.arange(0, _TURNED)
    turns, lower = channel < 2 * HALF, channel < HALF
    first_cos, cos_step = row_places(cos, batch)
    first_sin, sin_step = row_places(sin, batch)
    position = number_of(at, batch, 0)
    c = tl.load(first_cos + position * cos_step + channel, mask=turns, other=1.0).to(tl.float32)
    s = load_wide(first_sin + position * sin_step + channel, turns)
    row = ((batch * GROUPS + tl.program_id(1)) * tokens + token)[:, None] * DIM
    there = (token < tokens)[:, None] & (channel < DIM)
    own = load_wide(x + row + channel, there)
    other = tl.where(lower, channel + HALF, channel - HALF)
    facing = load_wide(x + row + other, there & turns)
    tilted = facing * s
    tl.store(out + row + channel, own * c + tl.where(lower, -tilted, tilted), mask=there)


@triton.jit
def _row_of(x, row, sequence, group, APART: tl.constexpr):
    """Return a pointer to the row of a cache into which a new token of this sequence and KV head
    goes. `row` holds its number. APART: the number of a sequence's KV heads if each has memory of
    its own, as a sequence of one head; else 0."""
    if APART:
        sequence, group = sequence * APART + group, group * 0
    first, step = head_rows(x, sequence, group)
    return first + number_of(row, sequence, 0) * step


@triton.jit(do_not_specialize=["tokens"])
def _turn(
    q, k, v, new_q, new_k, keys, values, row, q_norm, k_norm, eps, cos, sin, qt: tl.int64, kt: tl.int64, vt: tl.int64,
    tokens, APART: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """Norm and rotate some tokens of one query head or one KV head. If a cache `keys` and `values`
    is given, there is one token per sequence: its key is also written to `row` of the cache, and
    further programs write its value."""
    first, head, batch = tl.program_id(0) * ROWS, tl.program_id(1), program_at(2)
    live = first + tl.arange(0, ROWS) < tokens
    cosines, ct = row_places(cos, batch)
    sines, st = row_places(sin, batch)
    cosines, sines = cosines + first * ct, sines + first * st
    token = batch * tokens + first
    if head < HEADS:
        to = (batch * HEADS + head) * tokens + first
        _turn_head(
            q + token * qt + head * DIM, new_q + to * DIM, None, q_norm, cosines, sines, eps, qt, ct, st, live, DIM,
            HALF, NEIGHBOURS,
        )  # fmt: skip
    elif head < HEADS + GROUPS:
        group = head - HEADS
        to = (batch * GROUPS + group) * tokens + first
        stored = None
        if keys is not None:
            stored = _row_of(keys, row, batch, group, APART)
        _turn_head(
            k + token * kt + group * DIM, new_k + to * DIM, stored, k_norm, cosines, sines, eps, kt, ct, st, live, DIM,
            HALF, NEIGHBOURS,
        )  # fmt: skip
    elif values is not None:
        group, channel = head - HEADS - GROUPS, tl.arange(0, padded(DIM, 1))
        stored = _row_of(values, row, batch, group, APART)
        value = tl.load(v + token * vt + group * DIM + channel, mask=channel < DIM)
        tl.store(stored + channel, value, mask=channel < DIM)
