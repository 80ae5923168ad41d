"""Joins the weights of products that share an input in memory, so that a GPU computes them as one
product.

The modules' parameters stay the same objects with the same values, as views of the joint tensor:
`state_dict()` and a model's own forward see no difference. They stay joined, because other engines
of the model use them too; moving or converting the model separates them again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.inference_mode(mode=False)  # inference tensors could not be used outside of inference mode
def join_weights(layers: Iterable[Any]) -> None:
    """Join q, k and v of each decoder layer, and gate and up. Phi-3 has them joined already. At
    most one layer's weights are in memory twice at a time."""
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(attention, "qkv_proj"):
            continue
        moved = [
            _join([getattr(module, name) for module in modules])
            for modules in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj))
            for name in ("weight", "bias")
        ]
        if any(moved) and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # torch keeps the old weights' memory, which is too small for the next joint ones


def _join(parts: Sequence[nn.Parameter | None]) -> bool:
    """Join tensors if possible, and return whether they were moved. A parameter that is a view
    already stays where it is, because its memory would not be freed."""
    whole: list[Tensor] = [part.data for part in parts if part is not None]
    kinds = {(type(x), x.dtype, x.device, x.shape[1:]) for x in whole}
    alone = all(x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes and not x.is_inference() for x in whole)
    if len(whole) < len(parts) or len(kinds) > 1 or type(whole[0]) is not Tensor or not alone:
        return False
    for part, piece in zip(parts, torch.cat(whole).split([len(x) for x in whole]), strict=True):
        assert part is not None
        part.data = piece
    return True
