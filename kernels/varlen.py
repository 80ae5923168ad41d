"""Computes decode attention by torch's own `varlen_attn` (torch.nn.attention.varlen), from torch
2.13 on.

Its keys are a pool of pages [pages, page, G, D] and a table of the pages of each sequence. A
sequence here is one page, of which `seqused_k` tokens are there, so that nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature

import torch
from torch import Tensor
from torch.nn.attention import varlen

from kernels.reference import Segment
from kernels.whole_segments import attend, refusal

_PAGE = 256  # what the length of a page must be a multiple of
_NEEDED = {"return_aux", "seqused_k", "block_table", "enable_gqa", "scale"}

if lacking := sorted(_NEEDED - signature(varlen.varlen_attn).parameters.keys()):
    raise ImportError(f"varlen_attn of torch {torch.__version__} takes no {', '.join(lacking)}: torch 2.13 does")


def segment_attention(q: Tensor, segments: Sequence[Segment], scale: float) -> Tensor:
    """Attend from one token to segments, as kernels/reference.py defines it."""
    return attend(_read, q, segments, scale)[0]


def segment_attention_with_lse(q: Tensor, segments: Sequence[Segment], scale: float) -> tuple[Tensor, Tensor]:
    """Attend from one token to segments and return the log-sum-exp too, as kernels/reference.py
    defines it."""
    return attend(_read, q, segments, scale)


def segment_attention_refuses(q: Tensor, segments: Sequence[Segment], scale: float) -> str | None:
    odd = next((s.k.shape[2] for s in segments if len(q) > 1 and s.k.shape[2] % _PAGE), None)
    return refusal(q, segments) or (odd and f"takes several sequences in pages of {_PAGE} tokens, got {odd}") or None


segment_attention_with_lse_refuses = segment_attention_refuses


def _read(q: Tensor, segment: Segment, live: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, _, dim = q.shape
    stored = segment.k.shape[2]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    k, v = (x.transpose(1, 2) for x in segment[:2])  # [B S G D]
    if batch == 1:
        k, v, table = k[0], v[0], None
    else:
        table = ends[:-1].unsqueeze(1)
        live = torch.full_like(ends[1:], stored) if live is None else live
    out, lse = varlen.varlen_attn(
        q.view(batch, heads, dim), k, v, ends, ends * stored, 1, stored, return_aux=varlen.AuxRequest(lse=True),
        scale=scale, enable_gqa=True, seqused_k=live, block_table=table,
    )  # fmt: skip
    # Its page says [tokens, heads], its own shape function [heads, tokens], which is what flash-attn gives
    return out.view(q.shape), lse if lse.shape == (batch, heads) != (heads, batch) else lse.view(heads, batch).T
