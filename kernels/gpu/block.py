"""Computes a decoder block without its attention: torch does the products, and one kernel each what lies between two.

Results are rounded where kernels/block.py rounds, except that the last product and the sum with it are rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.block import TOKENS_AT_ONCE, DecoderBlock, Head, Linear
from kernels.gpu.common import head_rows, located, padded, unfit_floats
from kernels.gpu.weights import joint, unfit_weights
from kernels.ragged import Ragged, first_of

_MOST_CHANNELS = 32768  # channels of a row that one program norms
MOST_TURNED = 16  # tokens of a head that one program rotates
_GATED = 512  # channels that one program gates


class _Store(NamedTuple):
    """Says where k and v of new tokens are written too."""

    keys: Tensor | Ragged  # [B G S D]
    values: Tensor | Ragged
    row: Tensor  # [1] or [B]


def attention_inputs(
    x: Tensor, block: DecoderBlock, cos: Tensor, sin: Tensor, store: _Store | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm x, project it and rotate the heads, as kernels/block.py defines it."""
    normed = _normed(x.flatten(0, 1), block.norm, block.eps)
    whole = joint(block)[0]
    q, k, v = _products(normed, whole, block.q, block.k, block.v)
    q, k = _turned(q, k, v, block, cos, sin, x.shape[0], store)
    v = v.view(*x.shape[:2], -1, block.head_dim).transpose(1, 2)
    if whole is not None and x.shape[1] > 1:  # as a view of the joint product it would keep a prompt's q and k with it
        v = v.contiguous()
    return normed.view(x.shape), q, k, v


def attention_inputs_stored(
    x: Tensor,
    block: DecoderBlock,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor | Ragged,
    values: Tensor | Ragged,
    row: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return attention_inputs(x, block, cos, sin, _Store(keys, values, row))


def attention_inputs_stored_refuses(
    x: Tensor,
    block: DecoderBlock,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor | Ragged,
    values: Tensor | Ragged,
    row: Tensor,
) -> str | None:
    stored = [first_of(side) for side in (keys, values)]
    if any(side.stride(3) != 1 for side in stored):
        return "needs the channels of a row side by side"
    return attention_inputs_refuses(x, block, cos, sin) or unfit_floats(x, *stored)


def attention_inputs_refuses(x: Tensor, block: DecoderBlock, cos: Tensor, sin: Tensor) -> str | None:
    if cos.shape[-1] % 2:
        return f"turns pairs of channels, got {cos.shape[-1]}"
    return _unfit(x, block, cos, sin)


def block_output(x: Tensor, attended: Tensor, block: DecoderBlock) -> Tensor:
    rows, heads = x.flatten(0, 1), attended.transpose(1, 2).flatten(2).flatten(0, 1)
    out = x.new_empty(rows.shape)
    for some, seen, to in zip(*(part.split(TOKENS_AT_ONCE["cuda"]) for part in (rows, heads, out)), strict=True):
        normed = _added_and_normed(some, block.o(seen), block.mlp_norm, to, block.eps)
        gate, up = _products(normed, joint(block)[1], block.gate, block.up)
        if block.down.bias is None:
            to.addmm_(_gated(gate, up), block.down.weight.t())
        else:
            to += block.down(_gated(gate, up))
    return out.view(x.shape)


def block_output_refuses(x: Tensor, attended: Tensor, block: DecoderBlock) -> str | None:
    return _unfit(x, block, attended)


def token_logits(x: Tensor, head: Head) -> Tensor:
    return head.linear(_normed(x.flatten(0, 1), head.norm, head.eps)).unflatten(0, x.shape[:2])


def token_logits_refuses(x: Tensor, head: Head) -> str | None:
    return _unfit(x, head)


def _unfit(x: Tensor, weights: DecoderBlock | Head, *others: Tensor) -> str | None:
    if x.shape[-1] > _MOST_CHANNELS:
        return f"takes up to {_MOST_CHANNELS} channels, got {x.shape[-1]}"
    if any(part.stride(-1) != 1 for part in (x, *others)):
        return "needs the channels of a token side by side"
    return unfit_weights(weights) or unfit_floats(x, weights.norm, *others)


def _products(x: Tensor, whole: Linear | None, *parts: Linear) -> Sequence[Tensor]:
    """Multiply x [N E] by each part, or by the one matrix that they are slices of."""
    if whole is None:
        return [part(x) for part in parts]
    return whole(x).split([len(part.weight) for part in parts], -1)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm the rows of x [N E]."""
    out = x.new_empty(x.shape)
    _run_norm(x, None, weight, None, out, eps)
    return out


def _added_and_normed(x: Tensor, added: Tensor, weight: Tensor, total: Tensor, eps: float) -> Tensor:
    """Write x + added to `total`, and return the norm of that. [N E]"""
    out = x.new_empty(x.shape)
    _run_norm(x, added, weight, total, out, eps)
    return out


def _run_norm(x: Tensor, added: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float) -> None:
    rows, width = x.shape
    wide = padded(width)
    _norm[(rows,)](x, added, weight, total, out, eps, x.stride(0), width, wide, num_warps=min(16, max(1, wide // 512)))


def _turned(
    q: Tensor, k: Tensor, v: Tensor, block: DecoderBlock, cos: Tensor, sin: Tensor, batch: int, store: _Store | None
) -> tuple[Tensor, Tensor]:
    """Norm heads where the model does, rotate them and put them in order; write k and v to `store` if there is one. q
    [B*T H*D], k, v [B*T G*D] -> [B H T D], [B G T D]"""
    (tokens, turning), dim = cos.shape[1:], block.head_dim
    heads, groups = q.shape[1] // dim, k.shape[1] // dim
    new_q, new_k = (q.new_empty((batch, count, tokens, dim)) for count in (heads, groups))
    at_once = min(MOST_TURNED, triton.next_power_of_2(tokens))
    per_sequence = [x.stride(0) if x.shape[0] > 1 else 0 for x in (cos, sin)]
    (keys, of_keys, k_aligned), (values, of_values, v_aligned) = (
        ((None, None, 1),) * 2 if store is None else map(located, store[:2])
    )
    row = None if store is None else store.row
    _turn[(triton.cdiv(tokens, at_once), heads + groups * (1 if store is None else 2), batch)](
        q, k, v, new_q, new_k, keys, values, of_keys, of_values, row, block.q_norm, block.k_norm, cos, sin, block.eps,
        q.stride(0), k.stride(0), v.stride(0), *per_sequence, cos.stride(1), sin.stride(1),
        *((0,) * 6 if keys is None or values is None else (*keys.stride()[:3], *values.stride()[:3])), tokens,
        int(row is not None and len(row) > 1), heads, groups, dim, turning // 2, padded(turning // 2, 1),
        padded(dim - turning, 1), padded(dim, 1), at_once, min(k_aligned, v_aligned),
        num_warps=1 if at_once == 1 else 4,
        enable_fp_fusion=False,  # fusing would skip the rounding of a product
    )  # fmt: skip
    return new_q, new_k


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up. [N F]"""
    rows, width = gate.shape
    out = gate.new_empty(gate.shape)
    _gate[(rows, triton.cdiv(width, _GATED))](gate, up, out, gate.stride(0), up.stride(0), width, _GATED, num_warps=2)
    return out


@triton.jit
def _rounded(x, like):
    """Round x in fp32 as if it were stored at `like`."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _norm(x, added, weight, total, out, eps, xt: tl.int64, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Norm one row, after adding `added` to it if there is one."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDE)
    there = channel < WIDTH
    value = tl.load(x + row * xt + channel, mask=there, other=0.0).to(tl.float32)
    if added is not None:
        value += tl.load(added + row * WIDTH + channel, mask=there, other=0.0).to(tl.float32)
        value = _rounded(value, total)
        tl.store(total + row * WIDTH + channel, value, mask=there)
    scaled = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    gain = tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + channel, gain * _rounded(scaled, out), mask=there)


@triton.jit
def _times(x, share, norm, at, there):
    """Norm some channels of heads."""
    gain = tl.load(norm + at, mask=there, other=0.0).to(tl.float32)
    return _rounded(gain * _rounded(x * share[:, None], norm), norm)


@triton.jit
def _turn_head(
    x, out, stored, norm, cos, sin, eps, xt, ct, st, live, DIM: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
    REST_WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate channel i with i + HALF; channels from 2 * HALF on stay as they are. A single token may also go to a row
    `stored`."""
    token = tl.arange(0, ROWS).to(tl.int64)[:, None]
    channel = tl.arange(0, WIDE)
    still = 2 * HALF + tl.arange(0, REST_WIDE)
    there, beside = live[:, None] & (channel < HALF), live[:, None] & (still < DIM)
    lower = tl.load(x + token * xt + channel, mask=there, other=0.0).to(tl.float32)
    upper = tl.load(x + token * xt + HALF + channel, mask=there, other=0.0).to(tl.float32)
    rest = tl.load(x + token * xt + still, mask=beside, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(lower * lower, 1) + tl.sum(upper * upper, 1) + tl.sum(rest * rest, 1)
        share = tl.rsqrt(squares / DIM + eps)
        lower = _times(lower, share, norm, channel, channel < HALF)
        upper = _times(upper, share, norm, HALF + channel, channel < HALF)
        rest = _times(rest, share, norm, still, still < DIM)
    c = tl.load(cos + token * ct + channel, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin + token * st + channel, mask=there, other=0.0).to(tl.float32)
    turned_lower = _rounded(lower * c, out) - _rounded(upper * s, out)
    c = tl.load(cos + token * ct + HALF + channel, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin + token * st + HALF + channel, mask=there, other=0.0).to(tl.float32)
    turned_upper = _rounded(upper * c, out) + _rounded(lower * s, out)
    tl.store(out + token * DIM + channel, turned_lower, mask=there)
    tl.store(out + token * DIM + HALF + channel, turned_upper, mask=there)
    tl.store(out + token * DIM + still, rest, mask=beside)
    if stored is not None:
        tl.store(stored + token * DIM + channel, turned_lower, mask=there)
        tl.store(stored + token * DIM + HALF + channel, turned_upper, mask=there)
        tl.store(stored + token * DIM + still, rest, mask=beside)


@triton.jit
def _row_of(x, places, row, sequence, group, xb, xg, xt, EACH: tl.constexpr, ALIGNED: tl.constexpr):
    """Return where the row of a new token begins, in what a sequence holds for a KV head."""
    first, step = head_rows(x, places, sequence, group, xb, xg, xt, ALIGNED)
    return first + tl.load(row + sequence * EACH) * step


@triton.jit(do_not_specialize=["tokens"])
def _turn(
    q, k, v, new_q, new_k, keys, values, of_keys, of_values, row, q_norm, k_norm, cos, sin, eps, qt: tl.int64,
    kt: tl.int64, vt: tl.int64, cb: tl.int64, sb: tl.int64, ct: tl.int64, st: tl.int64, keys_b: tl.int64,
    keys_g: tl.int64, keys_t: tl.int64, values_b: tl.int64, values_g: tl.int64, values_t: tl.int64, tokens,
    EACH: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    WIDE: tl.constexpr, REST_WIDE: tl.constexpr, DIM_WIDE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Norm and rotate some tokens of one query head or of one KV head. Where `keys` and `values` are given there is one
    token, and its keys go there too, and those of further programs its values: to `row`, of EACH sequence or of all."""
    first, head, batch = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2).to(tl.int64)
    live = first + tl.arange(0, ROWS) < tokens
    cos, sin = cos + batch * cb + first * ct, sin + batch * sb + first * st
    token = batch * tokens + first
    if head < HEADS:
        to = (batch * HEADS + head) * tokens + first
        _turn_head(
            q + token * qt + head * DIM, new_q + to * DIM, None, q_norm, cos, sin, eps, qt, ct, st, live, DIM, HALF,
            WIDE, REST_WIDE, ROWS,
        )  # fmt: skip
    elif head < HEADS + GROUPS:
        group = head - HEADS
        to = (batch * GROUPS + group) * tokens + first
        stored = keys
        if keys is not None:
            stored = _row_of(keys, of_keys, row, batch, group, keys_b, keys_g, keys_t, EACH, ALIGNED)
        _turn_head(
            k + token * kt + group * DIM, new_k + to * DIM, stored, k_norm, cos, sin, eps, kt, ct, st, live, DIM, HALF,
            WIDE, REST_WIDE, ROWS,
        )  # fmt: skip
    elif values is not None:
        group, channel = head - HEADS - GROUPS, tl.arange(0, DIM_WIDE)
        stored = _row_of(values, of_values, row, batch, group, values_b, values_g, values_t, EACH, ALIGNED)
        value = tl.load(v + token * vt + group * DIM + channel, mask=channel < DIM)
        tl.store(stored + channel, value, mask=channel < DIM)


@triton.jit
def _gate(gate, up, out, gt: tl.int64, ut: tl.int64, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute silu(gate) * up for some channels of a row."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < WIDTH
    opened = tl.load(gate + row * gt + channel, mask=there, other=0.0).to(tl.float32)
    opened = _rounded(opened / (1.0 + tl.exp(-opened)), out)
    value = tl.load(up + row * ut + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + channel, opened * value, mask=there)
