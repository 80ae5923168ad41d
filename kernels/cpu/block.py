"""Computes a decoder block around its attention, compiled (block.cpp)."""

from __future__ import annotations

from torch import Tensor

from kernels.block import DecoderBlock, Head
from kernels.cpu import prompt, weights
from kernels.cpu.ffi.bindings import Function, Struct, elements, integer
from kernels.cpu.ffi.library import load
from kernels.cpu.weights import BlockInputs, BlockOutput, BlockWeights, HeadWeights

MOST_SEQUENCES = 8  # sequences of one token each; beyond that, torch's matrix product is faster


class TokenLogits(Struct):
    """Describe a call that norms the last token of each sequence and projects it to the
    vocabulary."""

    x = elements("batch * channels")
    out = elements("batch * rows", written=True)
    batch = channels = rows = integer()


_library = load(
    "block",
    Function("attention_inputs", BlockWeights, BlockInputs),
    Function("block_output", BlockWeights, BlockOutput),
    Function("token_logits", HeadWeights, TokenLogits),
)


def attention_inputs(x: Tensor, block: DecoderBlock, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm x, project it and rotate the heads, as kernels/block.py defines it."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    if _is_step(x):
        return prompt.inputs(x, block, cos, sin, _library.attention_inputs)
    if prompt.multiplies(x, block):
        return prompt.inputs(x, block, cos, sin)
    return prompt.inputs_by_torch(x, block, cos, sin)


def _is_step(x: Tensor) -> bool:
    return x.shape[1] == 1 and x.shape[0] <= MOST_SEQUENCES


def attention_inputs_refuses(x: Tensor, block: DecoderBlock, cos: Tensor, sin: Tensor) -> str | None:
    if cos.dtype != x.dtype:
        return f"takes one dtype, got x {x.dtype}, cos {cos.dtype}"
    return weights.unfit(x, block)


def block_output(x: Tensor, attended: Tensor, block: DecoderBlock) -> Tensor:
    x = x.contiguous()
    if _is_step(x):
        return prompt.output(x, attended, block, _library.block_output)
    if prompt.multiplies(x, block):
        return prompt.output(x, attended, block)
    return prompt.output_by_torch(x, attended, block)


def block_output_refuses(x: Tensor, attended: Tensor, block: DecoderBlock) -> str | None:
    return weights.unfit(x, block)


def token_logits(x: Tensor, head: Head) -> Tensor:
    x = x.contiguous()
    if not _is_step(x):
        return head.linear(prompt.normed_rows(x, head.norm, head.eps))
    (batch, _, channels), rows = x.shape, head.linear.weight.shape[0]
    out = x.new_empty((batch, 1, rows))
    _library.token_logits(weights.of_head(head), x=x, out=out, batch=batch, channels=channels, rows=rows)
    return out


def token_logits_refuses(x: Tensor, head: Head) -> str | None:
    return weights.unfit(x, head)
