"""Computes attention by flash-attn, where it is installed (`pip install 'kv-harness[flash]'`).

From version 2.1 on its causal mask is aligned at the bottom right, as a later chunk of a prompt
needs it, so no mask is made. From 2.6.1 on its decode attention returns the log-sum-exp, by which
segments are merged: it reads one whole segment after the other."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature

import torch
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from torch import Tensor

from kernels import ops
from kernels.ragged import RAGGED, Ragged
from kernels.reference import NARROW, Segment

_RETURNS_LSE = "return_softmax_lse" in signature(flash_attn_with_kvcache).parameters
_WIDEST = 256  # channels of a head
_DTYPES = (torch.bfloat16, torch.float16)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute causal attention of the last T of S tokens. q [B H T D], k, v [B G S D] ->
    [B H T D]"""
    by_token = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = flash_attn_func(*by_token, softmax_scale=scale, causal=True)
    return out.transpose(1, 2)


def prefill_attention_refuses(q, k, v, scale):
    if not q.is_cuda or q.dtype not in _DTYPES:
        return f"takes bfloat16 and float16 on a CUDA device, got {q.dtype} on {q.device}"
    if v.shape[3] != k.shape[3]:
        return NARROW.format(v.shape[3], k.shape[3])
    return None if q.shape[3] <= _WIDEST else f"takes heads up to {_WIDEST}, got {q.shape[3]}"


def segment_attention(q: Tensor, segments: Sequence[Segment], scale: float) -> Tensor:
    """Attend from one token per sequence to all tokens of the segments under one softmax, as
    kernels/reference.py defines it. q [B H 1 D] -> [B H 1 D]"""
    return segment_attention_with_lse(q, segments, scale)[0]


def segment_attention_with_lse(
    q: Tensor, segments: Sequence[Segment], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend from one token per sequence to segments and return the log-sum-exp too, [B H 1 D] and
    [B H], as kernels/reference.py defines it. The library reads keys and values in place: it takes
    [B S G D] with any strides but the last."""
    outs, lses = [], []
    for segment in segments:
        if not segment.k.shape[2]:
            continue
        live = (
            None
            if segment.live is None
            else segment.live.to(torch.int32).expand(len(q)).contiguous()
        )
        by_token = (x.transpose(1, 2) for x in (q, segment.k, segment.v))
        out, lse = flash_attn_with_kvcache(
            *by_token, cache_seqlens=live, softmax_scale=scale, return_softmax_lse=True
        )
        outs.append(out.transpose(1, 2))
        lse = lse.view(q.shape[:2])
        # Where no token is there, the library gives plus infinity, which would outweigh all other segments
        lses.append(lse if live is None else lse.masked_fill(live.unsqueeze(1) == 0, float("-inf")))
    if len(outs) == 1:
        return outs[0], lses[0]
    return ops.merge_attention_with_lse(outs, lses)


def segment_attention_refuses(q, segments, scale):
    if not _RETURNS_LSE:
        return "needs the log-sum-exp: install flash-attn 2.6.1 or newer"
    if q.shape[3] % 8:
        return f"takes heads of a multiple of 8, got {q.shape[3]}"
    for segment in segments:
        if segment.rows is not None:
            return "reads whole segments, got rows that were chosen"
        if segment.log_weights is not None:
            return "gives all tokens one weight, got log-weights"
        if isinstance(segment.k, Ragged):
            return RAGGED
    reasons = (prefill_attention_refuses(q, segment.k, segment.v, scale) for segment in segments)
    return next(filter(None, reasons), None)


segment_attention_with_lse_refuses = segment_attention_refuses
