"""Multiplies matrices in bfloat16 on processors for which torch has no fast product of it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, computed in fp32 where torch would multiply bfloat16 number by number (a CPU
    without AVX-512), which takes ten to a hundred times as long."""
    if a.is_cpu and a.dtype is torch.bfloat16 and not multiplies_bfloat16():
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


@cache
def multiplies_bfloat16() -> bool:
    """Return whether torch multiplies bfloat16 by oneDNN on this CPU."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
