"""Determines facts about a model's weights once: whether kernels can read them, and which are
contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from weakref import WeakKeyDictionary

from torch import Tensor

from kernels.block import DecoderBlock, Head, Linear
from kernels.gpu.common import unfit_shape

_unfit: WeakKeyDictionary[DecoderBlock | Head, str | None] = WeakKeyDictionary()
_joint: WeakKeyDictionary[DecoderBlock, tuple[Linear | None, Linear | None]] = WeakKeyDictionary()


def unfit_weights(weights: DecoderBlock | Head) -> str | None:
    """Return why no kernel can read these weights, or None: they must be contiguous, of one dtype
    and device, and fit together. The answer is cached per block."""
    if weights not in _unfit:
        tensors = _tensors(weights)
        kinds = {f"{x.dtype} on {x.device}" for x in tensors}
        if len(kinds) > 1 or not all(x.is_contiguous() for x in tensors):
            kinds_there = ", ".join(sorted(kinds))
            _unfit[weights] = f"takes contiguous weights of one dtype and device, got {kinds_there}"
        else:
            _unfit[weights] = _unfit_sides(weights)
    return _unfit[weights]


def joint(block: DecoderBlock) -> tuple[Linear | None, Linear | None]:
    """Return one matrix for q, k and v, and one for gate and up, where these are slices of one
    tensor (as in Phi-3), else None. Nothing is copied; with them one product does the work of
    several."""
    if block not in _joint:
        _joint[block] = _joined((block.q, block.k, block.v)), _joined((block.gate, block.up))
    return _joint[block]


def _unfit_sides(weights: DecoderBlock | Head) -> str | None:
    """Return which of the weights has a shape that does not fit the others, or None: kernels
    broadcast none of them."""
    if isinstance(weights, Head):
        return None
    width, inner = len(weights.norm), len(weights.gate.weight)
    wanted = {
        "o": (weights.o.weight, (width, None)),
        "up": (weights.up.weight, (inner, width)),
        "mlp_norm": (weights.mlp_norm, (width,)),
        "q_norm": (weights.q_norm, (weights.head_dim,)),
        "k_norm": (weights.k_norm, (weights.head_dim,)),
    }
    for name, (tensor, sizes) in wanted.items():
        if reason := unfit_shape(tensor, *sizes):
            return f"{name}: {reason}"
    return None


def _tensors(weights: DecoderBlock | Head | Linear) -> list[Tensor]:
    tensors: list[Tensor] = []
    for field in fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, Linear):
            tensors += _tensors(value)
        elif isinstance(value, Tensor):
            tensors.append(value)
    return tensors


def _joined(linears: Sequence[Linear]) -> Linear | None:
    weight = _under_one_another([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if weight is None or not biases:
        return None if weight is None else Linear(weight)
    bias = _under_one_another(biases) if len(biases) == len(linears) else None
    return None if bias is None else Linear(weight, bias)


def _under_one_another(parts: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor that views all of `parts` as its rows, if they follow one another without a
    gap in the same storage; else None."""
    first = parts[0]
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return None
        end += part.nbytes
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
