"""Computes attention with a sink logit: one more term in a query head's softmax, which takes weight
and adds no value.

GPT-OSS learns such a logit s per query head (arXiv 2508.10925). With it a token weighs exp(l) /
(sum exp(l) + exp(s)), so attention with it is attention without it times sigmoid(lse - s), where
lse is the log-sum-exp of the tokens' logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import ops
from kernels.coded import Codes, Rotated
from kernels.reference import Segment


def with_sink(out: Tensor, lse: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Turn attention that was computed without a sink logit (a term in each query head's softmax
    that takes weight and adds no value) into attention with it, by scaling it with sigmoid(lse -
    sink). out [B H T D], its log-sum-exp lse [B H T] or [B H], sink_logits [H] or None ->
    [B H T D]"""
    if sink_logits is None:
        return out
    share = torch.sigmoid(lse.view(*out.shape[:3], 1) - sink_logits.view(-1, 1, 1))
    return (out.float() * share).to(out.dtype)


def lse_with_sink(lse: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Return the log of the sum that a softmax divides by, including the sink logit, a term of each
    query head that takes weight and adds no value. lse [B H] or [B H T], without it; sink_logits
    [H] or None"""
    if sink_logits is None:
        return lse
    return torch.logaddexp(lse, sink_logits.view(-1, *[1] * (lse.dim() - 2)))


def softmax(logits: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Return the weights of the tokens in a softmax with a sink logit, one more term that belongs
    to no token. logits [B G g ... S], sink_logits [H] or None -> the same shape, with sums below
    1"""
    if sink_logits is None:
        return logits.softmax(-1)
    sink = sink_logits.view(*logits.shape[1:3], *[1] * (logits.dim() - 3)).expand(
        *logits.shape[:-1], 1
    )
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None
) -> Tensor:
    """Attend from the last T of S tokens to all before them and themselves. q [B H T D], k, v
    [B G S D], sink_logits [H] or None -> [B H T D]"""
    if sink_logits is None:
        return ops.prefill_attention(q, k, v, scale)
    return windowed_attention(q, k, v, scale, k.shape[2], sink_logits)


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, sink_logits: Tensor | None
) -> Tensor:
    """Attend from the last T of S tokens; each sees the last `window` tokens up to itself. q
    [B H T D], k, v [B G S D], sink_logits [H] or None -> [B H T D]"""
    out, lse = ops.windowed_attention(q, k, v, scale, k.shape[2] - q.shape[2], window)
    return with_sink(out, lse, sink_logits)


def segment_attention(
    q: Tensor,
    segments: Sequence[Segment | Codes | Rotated],
    scale: float,
    sink_logits: Tensor | None,
) -> Tensor:
    """Attend from one token per sequence to the tokens of all segments, plain or coded, under one
    softmax. q [B H 1 D], sink_logits [H] or None -> [B H 1 D]"""
    if sink_logits is None and all(isinstance(segment, Segment) for segment in segments):
        return ops.segment_attention(q, segments, scale)
    return with_sink(*_attended(q, segments, scale), sink_logits)


def segment_attention_with_lse(
    q: Tensor,
    segments: Sequence[Segment | Codes | Rotated],
    scale: float,
    sink_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend from one token per sequence to the tokens of all segments, as `segment_attention`
    does, and return the log of the sum that the softmax divides by too. -> [B H 1 D], [B H]
    (fp32)"""
    out, lse = _attended(q, segments, scale)
    return with_sink(out, lse, sink_logits), lse_with_sink(lse, sink_logits)


def _attended(
    q: Tensor, segments: Sequence[Segment | Codes | Rotated], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to all segments without a sink logit (no further term in the softmax), and return the
    log-sum-exp too. If some segments are codes (quantised keys and values), an operation of its own
    reads all. q [B H 1 D] -> [B H 1 D], [B H]"""
    coded = not all(isinstance(segment, Segment) for segment in segments)
    attend = ops.coded_attention if coded else ops.segment_attention_with_lse
    result: tuple[Tensor, Tensor] = attend(q, segments, scale)
    return result


def column_sums(q: Tensor, k: Tensor, scale: float, sink_logits: Tensor | None) -> Tensor:
    """Sum the attention weights that each key receives from the queries, which are the last T of S
    tokens. q [B H T D], k [B G S D], sink_logits [H] or None -> [B H S] (fp32)"""
    if sink_logits is None:
        return ops.column_sums(q, k, scale)
    return causal_attention_with_column_sums(q, k, k, scale, sink_logits)[1]


def causal_attention_with_column_sums(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend from the last T of S tokens to all before them and themselves, [B H T D], and sum the
    attention weights that each key receives, [B H S]. Without sink logits [H] the logits are
    computed once for both."""
    if sink_logits is None:
        return ops.prefill_attention_with_column_sums(q, k, v, scale)
    first, window = k.shape[2] - q.shape[2], k.shape[2]
    out, lse = ops.windowed_attention(q, k, v, scale, first, window)
    sums = ops.windowed_sums(q, k, lse_with_sink(lse, sink_logits), scale, first, window)
    return with_sink(out, lse, sink_logits), sums
