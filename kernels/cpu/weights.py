"""Packs the weights of a decoder block, and of the head, as the compiled files take them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.block import DecoderBlock, Head, Linear
from kernels.cpu.ffi.bindings import FieldGroup, Struct, elements, integer, real


def _linear(outs: str, ins: str) -> FieldGroup:
    return FieldGroup("Weights", {"weight": elements(f"{outs} * {ins}"), "bias": elements(outs, optional=True)})


class BlockWeights(Struct):
    """Describe the weights of a decoder block (DecoderBlock in kernels/block.py)."""

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


class HeadWeights(Struct):
    """Describe the final norm and the projection to the vocabulary."""

    norm = elements("channels")
    weights = _linear("rows", "channels")
    channels = rows = integer()
    eps = real()


class BlockInputs(Struct):
    """Describe a call for the part of a block before attention, of a decode step or of a prompt."""

    x = elements("batch * tokens * channels")
    cos = elements("angles * tokens * turned")
    sin = elements("angles * tokens * turned")
    normed = elements("batch * tokens * channels", written=True)
    q = elements("batch * tokens * q_channels", written=True)
    k = elements("batch * tokens * kv_channels", written=True)
    v = elements("batch * tokens * kv_channels", written=True)
    batch = tokens = channels = q_channels = kv_channels = integer()
    angles = turned = integer()  # angles: sequences in cos and sin, one or all; turned: channels that rotate


class BlockOutput(Struct):
    """Describe a call for the part of a block after attention."""

    x = elements("rows * channels")
    attended = elements("rows * q_channels")
    out = elements("rows * channels", written=True)
    rows = channels = q_channels = integer()


_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
_NAME = "cpu"  # under which blocks and heads keep their structs


def of_block(block: DecoderBlock) -> bytes:
    """Return struct BlockWeights; its addresses hold as long as the block does."""
    return block.prepared.get(_NAME) or _pack_block(block)


def of_head(head: Head) -> bytes:
    """Return struct HeadWeights; its addresses hold as long as the head does."""
    return head.prepared.get(_NAME) or _pack_head(head)


def unfit(x: Tensor, weights: DecoderBlock | Head) -> str | None:
    """Return why the compiled files cannot multiply x by these weights, or None if they can."""
    if _NAME in weights.prepared and x.dtype is weights.norm.dtype and x.is_cpu:
        return None
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return f"takes float32 and bfloat16 on the CPU, got {x.dtype} on {x.device}"
    for weight in _tensors(weights):
        if weight is not None and (weight.dtype != x.dtype or not weight.is_contiguous()):
            return f"takes contiguous weights of one dtype, got {weight.dtype} beside {x.dtype}"
    return None


def _tensors(weights: DecoderBlock | Head) -> list[Tensor | None]:
    if isinstance(weights, Head):
        return [weights.norm, weights.linear.weight, weights.linear.bias]
    linears = (getattr(weights, name) for name in _LINEARS)
    norms = (weights.norm, weights.q_norm, weights.k_norm, weights.mlp_norm)
    return [*norms, *(part for linear in linears for part in (linear.weight, linear.bias))]


def _pack_block(block: DecoderBlock) -> bytes:
    dim = block.head_dim
    linears: dict[str, Tensor | None] = {}
    for name in _LINEARS:
        linears |= _parts(name, getattr(block, name))
    packed = BlockWeights.pack(
        norm=block.norm, q_norm=block.q_norm, k_norm=block.k_norm, mlp_norm=block.mlp_norm,
        channels=len(block.norm), heads=len(block.q.weight) // dim, kv_heads=len(block.k.weight) // dim, head_dim=dim,
        inner=len(block.gate.weight), eps=block.eps, **linears,
    )  # fmt: skip
    block.prepared[_NAME] = packed
    return packed


def _pack_head(head: Head) -> bytes:
    rows, channels = head.linear.weight.shape
    packed = HeadWeights.pack(
        norm=head.norm, channels=channels, rows=rows, eps=head.eps, **_parts("weights", head.linear)
    )
    head.prepared[_NAME] = packed
    return packed


def _parts(name: str, linear: Linear) -> dict[str, Tensor | None]:
    return {f"{name}_weight": linear.weight, f"{name}_bias": linear.bias}
