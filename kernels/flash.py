"""Computes prefill attention by flash-attn, where it is installed
(`pip install 'kv-harness[flash]'`).

From version 2.1 on its causal mask is aligned at the bottom right, so that later chunks need no
mask either."""

from __future__ import annotations

import torch
from flash_attn import flash_attn_func
from torch import Tensor

_WIDEST = 256  # channels of a head
_DTYPES = (torch.bfloat16, torch.float16)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute causal attention of the last T of S tokens. q [B H T D], k, v [B G S D] ->
    [B H T D]"""
    by_token = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = flash_attn_func(*by_token, softmax_scale=scale, causal=True)
    return out.transpose(1, 2)


def prefill_attention_refuses(q: Tensor, k: Tensor, v: Tensor, scale: float) -> str | None:
    if not q.is_cuda or q.dtype not in _DTYPES:
        return f"takes bfloat16 and float16 on a CUDA device, got {q.dtype} on {q.device}"
    return f"takes heads of up to {_WIDEST}, got {q.shape[3]}" if q.shape[3] > _WIDEST else None
