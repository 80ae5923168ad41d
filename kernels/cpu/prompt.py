"""A decoder block of a prompt, compiled: prompt.cpp."""

from __future__ import annotations

from ctypes import c_char_p, c_double, c_int, c_int64, c_void_p
from struct import pack

import torch
from torch import Tensor

from kernels.block import Block
from kernels.cpu.library import load

_library = load("prompt")
_library.prompt_inputs.argtypes = [c_char_p, *[c_void_p] * 7, c_char_p]
_library.prompt_output.argtypes = [c_char_p, *[c_void_p] * 3, c_int64]
_library.norm_rows.argtypes = [c_int, *[c_void_p] * 3, c_int64, c_int64, c_double]
_library.turn_rows.argtypes = [c_int, *[c_void_p] * 5, c_char_p, c_double]
_library.gate_rows.argtypes = [c_int, *[c_void_p] * 2, c_int64]

TOKENS_AT_ONCE = 4096  # of a prompt: bounds the memory between torch's products
LEAST_TOKENS = 64  # below, packing the weights does not pay
MOST_INNER = 4096  # channels of the MLP; above, a thread's tokens leave its cache, and torch's products are faster
_FAST = {torch.float32: bool(_library.is_fast(0)), torch.bfloat16: bool(_library.is_fast(1))}
_PANEL = 32  # outputs; sums, too, go over a multiple of as many


def multiplies(x: Tensor, block: Block) -> bool:
    """Whether the products are compiled too, which pays for this block and so many tokens."""
    inner = block.gate.weight.shape[0]
    sizes = (*block.q.weight.shape, block.k.weight.shape[0], inner)
    whole = not any(size % _PANEL for size in sizes)
    return _FAST[x.dtype] and whole and inner <= MOST_INNER and x.shape[0] * x.shape[1] >= LEAST_TOKENS


def inputs(x: Tensor, block: Block, packed: bytes, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As attention_inputs in kernels/block.py. `packed`: struct Block."""
    (batch, tokens, _), dim, turned = x.shape, block.head_dim, cos.shape[-1]
    normed = torch.empty_like(x)
    q, k, v = (x.new_empty((batch, part.weight.shape[0] // dim, tokens, dim)) for part in (block.q, block.k, block.v))
    addresses = (part.data_ptr() for part in (x, cos, sin, normed, q, k, v))
    shape = pack("4q", batch, tokens, turned, tokens * turned * (cos.shape[0] > 1))
    _library.prompt_inputs(packed, *addresses, shape)
    return normed, q, k, v


def output(x: Tensor, attended: Tensor, packed: bytes) -> Tensor:
    """As block_output in kernels/block.py."""
    out, attended = torch.empty_like(x), attended.transpose(1, 2).contiguous()
    _library.prompt_output(packed, x.data_ptr(), attended.data_ptr(), out.data_ptr(), x.shape[0] * x.shape[1])
    return out


def inputs_by_torch(x: Tensor, block: Block, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with torch's matrix products."""
    normed = normed_rows(x, block.norm, block.eps)
    q = _turned(block.q(normed), block.q_norm, block, cos, sin)
    k = _turned(block.k(normed), block.k_norm, block, cos, sin)
    return normed, q, k, block.v(normed).unflatten(-1, (-1, block.head_dim)).transpose(1, 2)


def output_by_torch(x: Tensor, attended: Tensor, block: Block) -> Tensor:
    """Some tokens at a time, so that what is between the products takes bounded memory."""
    rows, heads = x.flatten(0, 1), attended.transpose(1, 2).flatten(2).flatten(0, 1)
    out = torch.empty_like(rows)
    for begin in range(0, len(rows), TOKENS_AT_ONCE):
        part = slice(begin, begin + TOKENS_AT_ONCE)
        middle = block.o(heads[part]).add_(rows[part])
        normed = normed_rows(middle, block.mlp_norm, block.eps)
        gate, up = block.gate(normed), block.up(normed)
        _library.gate_rows(gate.element_size() == 2, gate.data_ptr(), up.data_ptr(), gate.numel())
        torch.add(middle, block.down(gate), out=out[part])
    return out.view_as(x)


def normed_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out, width = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // width
    _library.norm_rows(x.element_size() == 2, x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps)
    return out


def _turned(x: Tensor, norm: Tensor | None, block: Block, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads of x [B T n*D], normed where the model does that, and rotated -> [B n T D]"""
    (batch, tokens, channels), turned = x.shape, cos.shape[-1]
    heads = channels // block.head_dim
    out = x.new_empty((batch, heads, tokens, block.head_dim))
    shape = pack("6q", *out.shape[:1], tokens, heads, block.head_dim, turned, tokens * turned * (cos.shape[0] > 1))
    _library.turn_rows(
        x.element_size() == 2, x.data_ptr(), _address(norm), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), shape,
        block.eps,
    )  # fmt: skip
    return out


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
