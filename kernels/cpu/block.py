"""A decoder block around its attention, compiled: block.cpp."""

from __future__ import annotations

from ctypes import c_char_p, c_int64, c_void_p
from struct import pack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kernels.block import Block, Head
from kernels.cpu import prompt
from kernels.cpu.library import load

_library = load("block")
_library.attention_inputs.argtypes = [c_char_p, *[c_void_p] * 7, *[c_int64] * 3]
_library.block_output.argtypes = [c_char_p, *[c_void_p] * 3, c_int64]
_library.token_logits.argtypes = [c_char_p, *[c_void_p] * 2, c_int64]

MOST_SEQUENCES = 8  # of one token each; beyond, torch's matrix product is faster
_packed: WeakKeyDictionary[Block | Head, bytes] = WeakKeyDictionary()


def attention_inputs(x: Tensor, block: Block, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As in kernels/block.py."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    if _is_step(x):
        return _token_inputs(x, block, cos, sin)
    if prompt.multiplies(x, block):
        return prompt.inputs(x, block, _packed.get(block) or _pack(block), cos, sin)
    return prompt.inputs_by_torch(x, block, cos, sin)


def _is_step(x: Tensor) -> bool:
    return x.shape[1] == 1 and x.shape[0] <= MOST_SEQUENCES


def _token_inputs(x: Tensor, block: Block, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, dim = x.shape[0], block.head_dim
    normed = torch.empty_like(x)
    q = x.new_empty((batch, block.q.weight.shape[0] // dim, 1, dim))
    k = x.new_empty((batch, block.k.weight.shape[0] // dim, 1, dim))
    v = torch.empty_like(k)
    turned = cos.shape[-1]
    _library.attention_inputs(
        _packed.get(block) or _pack(block), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), normed.data_ptr(),
        q.data_ptr(), k.data_ptr(), v.data_ptr(), batch, turned, turned if cos.shape[0] > 1 else 0,
    )  # fmt: skip
    return normed, q, k, v


def attention_inputs_refuses(x: Tensor, block: Block, cos: Tensor, sin: Tensor) -> str | None:
    if cos.dtype != x.dtype:
        return f"takes one dtype, got x {x.dtype}, cos {cos.dtype}"
    return _unfit(x, block)


def block_output(x: Tensor, attended: Tensor, block: Block) -> Tensor:
    x = x.contiguous()
    if not _is_step(x):
        if prompt.multiplies(x, block):
            return prompt.output(x, attended, _packed.get(block) or _pack(block))
        return prompt.output_by_torch(x, attended, block)
    attended = attended.contiguous()
    out = torch.empty_like(x)
    _library.block_output(
        _packed.get(block) or _pack(block), x.data_ptr(), attended.data_ptr(), out.data_ptr(), x.shape[0]
    )
    return out


def block_output_refuses(x: Tensor, attended: Tensor, block: Block) -> str | None:
    return _unfit(x, block)


def token_logits(x: Tensor, head: Head) -> Tensor:
    x = x.contiguous()
    if not _is_step(x):
        return head.linear(prompt.normed_rows(x, head.norm, head.eps))
    out = x.new_empty((*x.shape[:2], head.linear.weight.shape[0]))
    _library.token_logits(_packed.get(head) or _pack_head(head), x.data_ptr(), out.data_ptr(), x.shape[0])
    return out


def token_logits_refuses(x: Tensor, head: Head) -> str | None:
    if (reason := _unfit_call(x)) is not None or head in _packed:
        return reason
    return _unfit_weights(x.dtype, head.norm, head.linear.weight, head.linear.bias)


def _unfit_call(x: Tensor) -> str | None:
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return f"takes float32 and bfloat16 on the CPU, got {x.dtype} on {x.device}"
    return None


def _unfit(x: Tensor, block: Block) -> str | None:
    if (reason := _unfit_call(x)) is not None or block in _packed:
        return reason
    return _unfit_weights(x.dtype, *_tensors(block))


def _unfit_weights(dtype: torch.dtype, *weights: Tensor | None) -> str | None:
    for weight in weights:
        if weight is not None and (weight.dtype != dtype or not weight.is_contiguous()):
            return f"takes contiguous weights of one dtype, got {weight.dtype} beside {dtype}"
    return None


def _tensors(block: Block) -> list[Tensor | None]:
    linears = (block.q, block.k, block.v, block.o, block.gate, block.up, block.down)
    norms = (block.norm, block.q_norm, block.k_norm, block.mlp_norm)
    return [*norms, *(part for one in linears for part in (one.weight, one.bias))]


def _pack(block: Block) -> bytes:
    """struct Block of block.cpp; the addresses hold as long as the block does."""
    dim = block.head_dim
    shape = (block.q.weight.shape[1], block.q.weight.shape[0] // dim, block.k.weight.shape[0] // dim, dim)
    numbers = (block.norm.dtype == torch.bfloat16, *shape, block.gate.weight.shape[0])
    _packed[block] = pack("6qd18q", *numbers, block.eps, *(_address(part) for part in _tensors(block)))
    return _packed[block]


def _pack_head(head: Head) -> bytes:
    """struct Head of block.cpp."""
    weight, bias = head.linear.weight, head.linear.bias
    rows, channels = weight.shape
    addresses = (_address(part) for part in (head.norm, weight, bias))
    _packed[head] = pack("3qd3q", weight.dtype == torch.bfloat16, channels, rows, head.eps, *addresses)
    return _packed[head]


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
