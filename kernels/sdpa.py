"""Computes prefill attention by torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute causal attention of the last T of S tokens. q [B H T D], k, v [B G S D] -> [B H T D]"""
    new, stored = q.shape[2], k.shape[2]
    if new == stored:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    # is_causal aligns at the top left; a later chunk needs the bottom right.
    allowed = torch.ones(new, stored, dtype=torch.bool, device=q.device).tril(stored - new)
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True)
