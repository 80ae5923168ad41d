"""Computes a decoder block around its attention, compiled (block.cpp): for decode steps of a few
sequences, and for prompts where compiled products pay off. Plain torch does the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.block import DecoderBlock, Head, fits_compiled
from kernels.cpu.ffi.bindings import FieldGroup, Function, Struct, elements, integer, real
from kernels.cpu.ffi.library import load

# sequences of one token each, beyond which torch's matrix product is faster: by dot products, and on tiles of AMX
MOST_SEQUENCES, MOST_ON_TILES = 8, 64
LEAST_TOKENS = 64  # of a prompt; below this, packing the weights does not pay


def _linear(outs: str, ins: str) -> FieldGroup:
    return FieldGroup(
        "Weights", {"weight": elements(f"{outs} * {ins}"), "bias": elements(outs, optional=True)}
    )


class BlockWeights(Struct):
    """Describe the C++ struct of a decoder block's weights (`DecoderBlock` in kernels/block.py)."""

    norm = elements("channels")
    q_norm = elements("head_dim", optional=True)
    k_norm = elements("head_dim", optional=True)
    mlp_norm = elements("channels")
    q = _linear("heads * head_dim", "channels")
    k = _linear("kv_heads * head_dim", "channels")
    v = _linear("kv_heads * head_dim", "channels")
    o = _linear("channels", "heads * head_dim")
    gate = _linear("inner", "channels")
    up = _linear("inner", "channels")
    down = _linear("channels", "inner")
    channels = heads = kv_heads = head_dim = inner = integer()
    eps = real()


class BlockInputs(Struct):
    """Describe a call that computes what comes before attention in a decoder block (norm, q, k, v),
    for a decode step or a prompt."""

    x = elements("batch * tokens * channels")
    cos = elements("angles * tokens * turned")
    sin = elements("angles * tokens * turned")
    normed = elements("batch * tokens * channels", written=True)
    q = elements("batch * tokens * q_channels", written=True)
    k = elements("batch * tokens * kv_channels", written=True)
    v = elements("batch * tokens * kv_channels", written=True)
    batch = tokens = channels = q_channels = kv_channels = integer()
    # angles: sequences in cos and sin, one or all; turned: channels that rotate
    angles = turned = integer()


class BlockOutput(Struct):
    """Describe a call that computes what follows attention in a decoder block: output projection
    and MLP."""

    x = elements("rows * channels")
    attended = elements("rows * q_channels")
    out = elements("rows * channels", written=True)
    rows = channels = q_channels = integer()


class HeadWeights(Struct):
    """Describe the weights of a model's end: the final norm and the projection to the
    vocabulary."""

    norm = elements("channels")
    weights = _linear("rows", "channels")
    channels = rows = integer()
    eps = real()


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
    Function("prompt_inputs", BlockWeights, BlockInputs),
    Function("prompt_output", BlockWeights, BlockOutput),
    Function("token_logits", HeadWeights, TokenLogits),
    Function("is_fast_in_float32", returns="int64_t"),
    Function("is_fast_in_bfloat16", returns="int64_t"),
    Function("is_on_tiles", returns="int64_t"),
)

FAST = {
    torch.float32: bool(_library.is_fast_in_float32()),
    torch.bfloat16: bool(_library.is_fast_in_bfloat16()),
}
_MOST = {
    torch.float32: MOST_SEQUENCES,
    torch.bfloat16: MOST_ON_TILES if _library.is_on_tiles() else MOST_SEQUENCES,
}
_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
_NAME = "cpu"  # under which blocks and heads keep their packed weights


def attention_inputs(
    x: Tensor, block: DecoderBlock, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm x [B T E], project it, and rotate the heads, as kernels/block.py defines it. Return
    normed [B T E], q [B H T D], k and v [B G T D]."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    (batch, tokens, channels), dim = x.shape, block.head_dim
    heads, kv_heads = block.q.weight.shape[0] // dim, block.k.weight.shape[0] // dim
    normed, q = torch.empty_like(x), x.new_empty((batch, heads, tokens, dim))
    k, v = x.new_empty((batch, kv_heads, tokens, dim)), x.new_empty((batch, kv_heads, tokens, dim))
    run = _library.attention_inputs if tokens == 1 else _library.prompt_inputs
    run(
        _of_block(block), x=x, cos=cos, sin=sin, normed=normed, q=q, k=k, v=v, batch=batch, tokens=tokens,
        channels=channels, q_channels=heads * dim, kv_channels=kv_heads * dim, angles=cos.shape[0],
        turned=cos.shape[2],
    )  # fmt: skip
    return normed, q, k, v


def attention_inputs_refuses(x, block, cos, sin):
    if cos.dtype != x.dtype:
        return f"takes one dtype, got x {x.dtype}, cos {cos.dtype}"
    if block.neighbours:
        return "turns the halves of a head together, not neighbouring channels"
    return block_output_refuses(x, x, block)


def block_output(x: Tensor, attended: Tensor, block: DecoderBlock) -> Tensor:
    """Apply the output projection and the MLP to attended [B H T D], each with its residual, as
    kernels/block.py defines it. x [B T E], the block's input -> [B T E]"""
    x = x.contiguous()
    (batch, tokens, channels), q_channels = x.shape, attended.shape[1] * attended.shape[3]
    # of one token the heads lie in the same order either way
    out = torch.empty_like(x)
    heads = (attended if tokens == 1 else attended.transpose(1, 2)).contiguous()
    run = _library.block_output if tokens == 1 else _library.prompt_output
    run(
        _of_block(block),
        x=x,
        attended=heads,
        out=out,
        rows=batch * tokens,
        channels=channels,
        q_channels=q_channels,
    )
    return out


def block_output_refuses(x, attended, block):
    return _unfit(x, block) or (
        None if _is_step(x) or _multiplies(x, block) else "leaves such a prompt to torch"
    )


def token_logits(x: Tensor, head: Head) -> Tensor:
    x = x.contiguous()
    (batch, _, channels), rows = x.shape, head.linear.weight.shape[0]
    out = x.new_empty((batch, 1, rows))
    _library.token_logits(_of_head(head), x=x, out=out, batch=batch, channels=channels, rows=rows)
    return out


def token_logits_refuses(x, head):
    return _unfit(x, head) or (
        None if _is_step(x) else f"takes one token of up to {_MOST[x.dtype]} sequences"
    )


def _is_step(x: Tensor) -> bool:
    return x.shape[1] == 1 and x.shape[0] <= _MOST[x.dtype]


def _multiplies(x: Tensor, block: DecoderBlock) -> bool:
    """Return whether the compiled matrix products pay off for a prompt x [B T E] in this block,
    given its sizes and the number of tokens."""
    fits = fits_compiled(
        (*block.q.weight.shape, block.k.weight.shape[0]), block.gate.weight.shape[0], x.dtype
    )
    return FAST[x.dtype] and fits and x.shape[1] > 1 and x.shape[0] * x.shape[1] >= LEAST_TOKENS


def _unfit(x: Tensor, weights: DecoderBlock | Head) -> str | None:
    """Return why the compiled functions cannot multiply x by these weights, or None if they can."""
    if _NAME in weights.prepared and x.dtype is weights.norm.dtype and x.is_cpu:
        return None
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return f"takes float32 and bfloat16 on the CPU, got {x.dtype} on {x.device}"
    if isinstance(weights, Head):
        tensors = [weights.norm, weights.linear.weight, weights.linear.bias]
    else:
        linears = [getattr(weights, name) for name in _LINEARS]
        tensors = [weights.norm, weights.q_norm, weights.k_norm, weights.mlp_norm]
        tensors += [part for linear in linears for part in (linear.weight, linear.bias)]
    for tensor in tensors:
        if tensor is not None and (tensor.dtype != x.dtype or not tensor.is_contiguous()):
            return f"takes contiguous weights of one dtype, got {tensor.dtype} beside {x.dtype}"
    return None


def _of_block(block: DecoderBlock) -> bytes:
    """Return the weights' addresses and sizes as the bytes of the C++ struct BlockWeights, packed
    once per block; the addresses are valid as long as the block exists."""
    if (packed := block.prepared.get(_NAME)) is None:
        linears: dict[str, Tensor | None] = {}
        for name in _LINEARS:
            linear = getattr(block, name)
            linears |= {f"{name}_weight": linear.weight, f"{name}_bias": linear.bias}
        dim = block.head_dim
        packed = block.prepared[_NAME] = BlockWeights.pack(
            norm=block.norm, q_norm=block.q_norm, k_norm=block.k_norm, mlp_norm=block.mlp_norm,
            channels=len(block.norm), heads=len(block.q.weight) // dim, kv_heads=len(block.k.weight) // dim,
            head_dim=dim, inner=len(block.gate.weight), eps=block.eps, **linears,
        )  # fmt: skip
    return packed


def _of_head(head: Head) -> bytes:
    """Return the weights' addresses and sizes as the bytes of the C++ struct HeadWeights, packed
    once per head; the addresses are valid as long as the head exists."""
    if (packed := head.prepared.get(_NAME)) is None:
        rows, channels = head.linear.weight.shape
        packed = head.prepared[_NAME] = HeadWeights.pack(
            norm=head.norm, weights_weight=head.linear.weight, weights_bias=head.linear.bias, channels=channels,
            rows=rows, eps=head.eps,
        )  # fmt: skip
    return packed
