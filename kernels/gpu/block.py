"""Computes a decoder block without its attention: torch computes the products, and one kernel each
what lies between two.

Results are rounded where kernels/block.py rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kernels.block import DecoderBlock, Head, Linear, summed
from kernels.gpu.common import (
    load_wide,
    padded,
    program_at,
    rounded,
    unfit_floats,
    unfit_numbers,
    unfit_shape,
)
from kernels.gpu.rope import NewRows, turned, unfit_angles
from kernels.gpu.weights import joint, unfit_weights
from kernels.ragged import Ragged, first_of

_MOST_CHANNELS = 32768  # channels of a row that one program norms
_GATED = tl.constexpr(512)  # channels that one program gates


def attention_inputs(
    x: Tensor, block: DecoderBlock, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm x [B T E], project it, and rotate the heads, as kernels/block.py defines it. Return
    normed [B T E], q [B H T D], k and v [B G T D]."""
    return _inputs(x, _norm_of(x.flatten(0, 1), block.norm, block.eps), block, cos, sin, None)


def attention_inputs_stored(
    x: Tensor,
    added: Tensor | None,
    block: DecoderBlock,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor | Ragged,
    values: Tensor | Ragged,
    row: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    store, rows = NewRows(keys, values, row), x.flatten(0, 1)
    if added is None:
        return x, *_inputs(x, _norm_of(rows, block.norm, block.eps), block, cos, sin, store)
    total = rows.new_empty(rows.shape)
    normed = _norm_of(rows, block.norm, block.eps, added.flatten(0, 1), total)
    return total.view(x.shape), *_inputs(x, normed, block, cos, sin, store)


def attention_inputs_stored_refuses(x, added, block, cos, sin, keys, values, row):
    stored = [first_of(side) for side in (keys, values)]
    if any(side.stride(3) != 1 for side in stored):
        return "needs the channels of a row side by side"
    if added is not None and not added.is_contiguous():
        return "needs what is added without gaps"
    groups = len(block.k.weight) // block.head_dim
    held = (len(x) * groups, 1) if keys.shape[1] == 1 else (len(x), groups)
    return (
        unfit_shape(x, None, 1, None)
        or unfit_shape(added, *x.shape)
        or unfit_shape(keys, *held, None, block.head_dim)
        or unfit_shape(values, *held, None, block.head_dim)
        or unfit_numbers(row, held[0])
        or attention_inputs_refuses(x, block, cos, sin)
        or unfit_floats(x, *stored, *([] if added is None else [added]))
    )


def _inputs(
    x: Tensor, normed: Tensor, block: DecoderBlock, cos: Tensor, sin: Tensor, store: NewRows | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project the normed states [B*T E] to q, k and v and rotate the heads; if there is a `store`,
    write k and v into it too. Return, for x [B T E], normed in that shape, q [B H T D], k and v
    [B G T D]."""
    whole = joint(block)[0]
    q, k, v = _products(normed, whole, block.q, block.k, block.v)
    q, k = turned(q, k, v, block, cos, sin, x.shape[0], store)
    v = v.view(*x.shape[:2], -1, block.head_dim).transpose(1, 2)
    # as a view of the joint product it would keep a prompt's q and k with it
    if whole is not None and x.shape[1] > 1:
        v = v.contiguous()
    return normed.view(x.shape), q, k, v


def attention_inputs_refuses(x, block, cos, sin):
    return unfit_angles(x.shape[0], x.shape[1], block.head_dim, cos, sin) or _unfit(
        x, block, cos, sin
    )


def block_output(x: Tensor, attended: Tensor, block: DecoderBlock) -> Tensor:
    return summed(x, attended, block, _parts)


def block_output_refuses(x, attended, block):
    return unfit_shape(attended, len(x), None, x.shape[1], block.head_dim) or _unfit(
        x, block, attended
    )


def block_output_apart(x: Tensor, attended: Tensor, block: DecoderBlock) -> tuple[Tensor, Tensor]:
    middle, added = _parts(
        x.flatten(0, 1), attended.transpose(1, 2).flatten(2).flatten(0, 1), block
    )
    return middle.view(x.shape), added.view(x.shape)


block_output_apart_refuses = block_output_refuses


def _parts(x: Tensor, attended: Tensor, block: DecoderBlock) -> tuple[Tensor, Tensor]:
    """Return the two terms of a decoder block's last sum, the residual stream and the MLP's output,
    for tokens x [N E] whose attention is attended [N H*D]. -> [N E] each"""
    middle = x.new_empty(x.shape)
    normed = _norm_of(x, block.mlp_norm, block.eps, block.o(attended), middle)
    gate, up = _products(normed, joint(block)[1], block.gate, block.up)
    gated, width = gate.new_empty(gate.shape), gate.shape[1]
    _gate[(len(gate), triton.cdiv(width, _GATED))](
        gate, up, gated, gate.stride(0), up.stride(0), width, num_warps=2
    )
    return middle, block.down(gated)


def token_logits(x: Tensor, head: Head) -> Tensor:
    return head.linear(_norm_of(x.flatten(0, 1), head.norm, head.eps)).unflatten(0, x.shape[:2])


def token_logits_refuses(x, head):
    return _unfit(x, head)


def _unfit(x: Tensor, weights: DecoderBlock | Head, *others: Tensor) -> str | None:
    if x.shape[-1] > _MOST_CHANNELS:
        return f"takes up to {_MOST_CHANNELS} channels, got {x.shape[-1]}"
    if any(part.stride(-1) != 1 for part in (x, *others)):
        return "needs the channels of a token side by side"
    sides = unfit_shape(x, None, None, len(weights.norm))
    return sides or unfit_weights(weights) or unfit_floats(x, weights.norm, *others)


def _products(x: Tensor, whole: Linear | None, *parts: Linear) -> Sequence[Tensor]:
    """Multiply x [N E] by each of `parts`, or by `whole`, the one matrix that they are slices of,
    if there is one. Return one product per part."""
    if whole is None:
        return [part(x) for part in parts]
    return whole(x).split([len(part.weight) for part in parts], -1)


def _norm_of(
    x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """Return RMSNorm of the rows of x [N E], or of x + `added`, which is written to `total`."""
    out, width = x.new_empty(x.shape), x.shape[1]
    warps = min(16, max(1, padded(width) // 512))
    _norm[(len(x),)](x, added, weight, total, out, eps, x.stride(0), width, num_warps=warps)
    return out


@triton.jit
def _norm(x, added, weight, total, out, eps, xt: tl.int64, WIDTH: tl.constexpr):
    """Write RMSNorm of one row of x to `out`. If `added` is given, add it to the row first, and
    write the sum to `total`."""
    row = program_at(0)
    channel = tl.arange(0, padded(WIDTH))
    there = channel < WIDTH
    value = load_wide(x + row * xt + channel, there)
    if added is not None:
        value += load_wide(added + row * WIDTH + channel, there)
        value = rounded(value, total)
        tl.store(total + row * WIDTH + channel, value, mask=there)
    scaled = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    gain = load_wide(weight + channel, there)
    tl.store(out + row * WIDTH + channel, gain * rounded(scaled, out), mask=there)


@triton.jit
def _gate(gate, up, out, gt: tl.int64, ut: tl.int64, WIDTH: tl.constexpr):
    """Compute silu(gate) * up for some channels of a row."""
    row = program_at(0)
    channel = tl.program_id(1) * _GATED + tl.arange(0, _GATED)
    there = channel < WIDTH
    opened = load_wide(gate + row * gt + channel, there)
    opened = rounded(opened / (1.0 + tl.exp(-opened)), out)
    value = load_wide(up + row * ut + channel, there)
    tl.store(out + row * WIDTH + channel, opened * value, mask=there)
