"""Rotates heads by position in one kernel, where nothing else is done with them."""

from __future__ import annotations

import triton
from torch import Tensor

from kernels.gpu.block import MOST_TURNED, _turn
from kernels.gpu.common import padded, unfit_heads


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B G T D], as kernels/rope.py defines it: as the queries of a block that norms no heads."""
    (batch, heads, tokens, dim), half = x.shape, cos.shape[-1] // 2
    rows, out = x.transpose(1, 2).reshape(batch * tokens, heads * dim), x.new_empty(x.shape)
    at_once = min(MOST_TURNED, triton.next_power_of_2(tokens))
    per_sequence = [angle.stride(0) if len(angle) > 1 else 0 for angle in (cos, sin)]
    if out.numel():
        _turn[(triton.cdiv(tokens, at_once), heads, batch)](
            rows, rows, rows, out, out, None, None, None, None, None, None, None, cos, sin, 0.0, rows.stride(0), 0, 0,
            *per_sequence, cos.stride(1), sin.stride(1), *[0] * 6, tokens, 0, heads, 0, dim, half, padded(half, 1),
            padded(dim - 2 * half, 1), padded(dim, 1), at_once, 1, num_warps=1 if at_once == 1 else 4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def rotate_refuses(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    if cos.shape[-1] % 2:
        return f"turns pairs of channels, got {cos.shape[-1]}"
    return unfit_heads(x, cos, sin)
