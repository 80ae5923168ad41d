"""Computes prefill attention by torch's scaled_dot_product_attention, whatever the device.

Its is_causal aligns at the top left, and a later chunk of a prompt needs the bottom right: that
wants a mask, which is made for some queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.reference import NARROW

_MASKED_AT_ONCE = 1 << 20  # pairs of a query and a key; a block still gets _LEAST_QUERIES
_LEAST_QUERIES = 32


def prefill_attention_refuses(q, k, v, scale):
    # torch would write all logits to memory
    return None if v.shape[3] == k.shape[3] else NARROW.format(v.shape[3], k.shape[3])


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute causal attention of the last T of S tokens. q [B H T D], k, v [B G S D] ->
    [B H T D]"""
    new, stored = q.shape[2], k.shape[2]
    if new == stored:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    out = torch.empty_like(q)
    seen = stored - new
    for queries, to in zip(
        *(x.split(max(_LEAST_QUERIES, _MASKED_AT_ONCE // stored), 2) for x in (q, out)), strict=True
    ):
        count = queries.shape[2]
        seen += count
        allowed = torch.ones(count, seen, dtype=torch.bool, device=q.device).tril(seen - count)
        keys, values = k[:, :, :seen], v[:, :, :seen]
        to.copy_(
            scaled_dot_product_attention(
                queries, keys, values, attn_mask=allowed, scale=scale, enable_gqa=True
            )
        )
    return out
