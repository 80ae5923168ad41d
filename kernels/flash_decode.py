"""Computes decode attention by flash-attn's `flash_attn_with_kvcache`, where it is installed.

From release 2.6.1 on it returns the log-sum-exp, without which segments could not be merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature

from flash_attn import flash_attn_with_kvcache
from torch import Tensor

from kernels.reference import Segment
from kernels.whole_segments import attend, refusal

if "return_softmax_lse" not in signature(flash_attn_with_kvcache).parameters:
    raise ImportError("flash_attn_with_kvcache returns no log-sum-exp: install flash-attn 2.6.1 or newer")


def segment_attention(q: Tensor, segments: Sequence[Segment], scale: float) -> Tensor:
    """Attend from one token to segments, as kernels/reference.py defines it."""
    return attend(_read, q, segments, scale)[0]


def segment_attention_with_lse(q: Tensor, segments: Sequence[Segment], scale: float) -> tuple[Tensor, Tensor]:
    """Attend from one token to segments and return the log-sum-exp too, as kernels/reference.py
    defines it."""
    return attend(_read, q, segments, scale)


def segment_attention_refuses(q: Tensor, segments: Sequence[Segment], scale: float) -> str | None:
    return refusal(q, segments)


segment_attention_with_lse_refuses = segment_attention_refuses


def _read(q: Tensor, segment: Segment, live: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Let the library read rows where they lie: it takes [B S G D] with any steps but the last."""
    by_token = (x.transpose(1, 2) for x in (q, segment.k, segment.v))
    out, lse = flash_attn_with_kvcache(*by_token, cache_seqlens=live, softmax_scale=scale, return_softmax_lse=True)
    return out.transpose(1, 2), lse.view(q.shape[:2])
