"""Computes a decoder block for a prompt, compiled (prompt.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.block import TOKENS_AT_ONCE, DecoderBlock, fits_compiled
from kernels.cpu import weights
from kernels.cpu.ffi.bindings import Function, Struct, elements, integer, real
from kernels.cpu.ffi.library import load
from kernels.cpu.weights import BlockInputs, BlockOutput, BlockWeights


class NormRows(Struct):
    """Describe a call that norms rows."""

    x = elements("rows * width")
    weight = elements("width")
    out = elements("rows * width", written=True)
    rows = width = integer()
    eps = real()


class TurnRows(Struct):
    """Describe a call that norms and rotates heads and puts them in order: x [B T n D] -> out
    [B n T D]."""

    x = elements("batch * tokens * heads * dim")
    norm = elements("dim", optional=True)
    cos = elements("angles * tokens * turned")
    sin = elements("angles * tokens * turned")
    out = elements("batch * tokens * heads * dim", written=True)
    batch = tokens = heads = dim = integer()
    angles = turned = integer()  # as in BlockInputs
    eps = real()


class GateRows(Struct):
    """Describe a call that computes gate = silu(gate) * up."""

    gate = elements("count", written=True)
    up = elements("count")
    count = integer()


_library = load(
    "prompt",
    Function("prompt_inputs", BlockWeights, BlockInputs),
    Function("prompt_output", BlockWeights, BlockOutput),
    Function("norm_rows", NormRows),
    Function("turn_rows", TurnRows),
    Function("gate_rows", GateRows),
    Function("is_fast_in_float32", returns="int64_t"),
    Function("is_fast_in_bfloat16", returns="int64_t"),
)

LEAST_TOKENS = 64  # below this, packing the weights does not pay
FAST = {
    torch.float32: bool(_library.is_fast_in_float32()),
    torch.bfloat16: bool(_library.is_fast_in_bfloat16()),
}


def multiplies(x: Tensor, block: DecoderBlock) -> bool:
    """Return whether the products are compiled too, which pays off for blocks of this size and so
    many tokens."""
    fits = fits_compiled((*block.q.weight.shape, block.k.weight.shape[0]), block.gate.weight.shape[0], x.dtype)
    return FAST[x.dtype] and fits and x.shape[0] * x.shape[1] >= LEAST_TOKENS


def inputs(
    x: Tensor, block: DecoderBlock, cos: Tensor, sin: Tensor, run: Callable[..., None] = _library.prompt_inputs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm x, project it and rotate the heads, as attention_inputs of kernels/block.py defines
    it."""
    (batch, tokens, channels), dim = x.shape, block.head_dim
    heads, kv_heads = block.q.weight.shape[0] // dim, block.k.weight.shape[0] // dim
    normed, q = torch.empty_like(x), x.new_empty((batch, heads, tokens, dim))
    k, v = x.new_empty((batch, kv_heads, tokens, dim)), x.new_empty((batch, kv_heads, tokens, dim))
    run(
        weights.of_block(block), x=x, cos=cos, sin=sin, normed=normed, q=q, k=k, v=v, batch=batch, tokens=tokens,
        channels=channels, q_channels=heads * dim, kv_channels=kv_heads * dim, angles=cos.shape[0],
        turned=cos.shape[2],
    )  # fmt: skip
    return normed, q, k, v


def output(
    x: Tensor, attended: Tensor, block: DecoderBlock, run: Callable[..., None] = _library.prompt_output
) -> Tensor:
    """Apply output projection and MLP, as block_output of kernels/block.py defines it."""
    (batch, tokens, channels), q_channels = x.shape, attended.shape[1] * attended.shape[3]
    # of one token the heads lie in the same order either way
    out, heads = torch.empty_like(x), (attended if tokens == 1 else attended.transpose(1, 2)).contiguous()
    run(
        weights.of_block(block), x=x, attended=heads, out=out, rows=batch * tokens, channels=channels,
        q_channels=q_channels,
    )  # fmt: skip
    return out


def inputs_by_torch(x: Tensor, block: DecoderBlock, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm x, project it by torch's matrix products and rotate the heads."""
    normed = normed_rows(x, block.norm, block.eps)
    q = _turned(block.q(normed), block.q_norm, block, cos, sin)
    k = _turned(block.k(normed), block.k_norm, block, cos, sin)
    return normed, q, k, block.v(normed).unflatten(-1, (-1, block.head_dim)).transpose(1, 2)


def output_by_torch(x: Tensor, attended: Tensor, block: DecoderBlock) -> Tensor:
    """Apply output projection and MLP by torch's matrix products, to some tokens at a time, so that
    the memory between the products is bounded."""
    rows, heads = x.flatten(0, 1), attended.transpose(1, 2).flatten(2).flatten(0, 1)
    out = torch.empty_like(rows)
    for begin in range(0, len(rows), TOKENS_AT_ONCE["cpu"]):
        part = slice(begin, begin + TOKENS_AT_ONCE["cpu"])
        middle = block.o(heads[part]).add_(rows[part])
        normed = normed_rows(middle, block.mlp_norm, block.eps)
        gate, up = block.gate(normed), block.up(normed)
        _library.gate_rows(gate=gate, up=up, count=gate.numel())
        torch.add(middle, block.down(gate), out=out[part])
    return out.view_as(x)


def normed_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out, width = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // width
    _library.norm_rows(x=x, weight=weight, out=out, rows=rows, width=width, eps=eps)
    return out


def _turned(x: Tensor, norm: Tensor | None, block: DecoderBlock, cos: Tensor, sin: Tensor) -> Tensor:
    """Norm the heads of x [B T n*D] where the model does, and rotate them. -> [B n T D]"""
    batch, tokens, channels = x.shape
    heads = channels // block.head_dim
    out = x.new_empty((batch, heads, tokens, block.head_dim))
    _library.turn_rows(
        x=x, norm=norm, cos=cos, sin=sin, out=out, batch=batch, tokens=tokens, heads=heads, dim=block.head_dim,
        angles=cos.shape[0], turned=cos.shape[2], eps=block.eps,
    )  # fmt: skip
    return out
