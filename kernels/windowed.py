"""Computes attention of queries that see the keys before them, or the last of these, and how much
attention each key receives, summed over queries: the scores of H2O and SnapKV.

The weights are made for a block of queries at a time, so memory is linear in the stored tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_QUERIES_AT_ONCE = 256  # fewer where all heads together would have more than _WEIGHTS_AT_ONCE
_WEIGHTS_AT_ONCE, _LEAST_QUERIES = 1 << 22, 16


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, first: int, window: int
) -> tuple[Tensor, Tensor]:
    """Attend from queries that each see the last `window` keys only: query t of T sees those up to
    key `first` + t. Return the attention, and the log of the sum that each softmax divides by, for
    `merge_attention`. A query that sees no key gets 0 and minus infinity.

    q [B H T D], k [B G S D], v [B G S Dv] -> [B H T Dv], [B H T] (fp32)"""
    outs, lses = [], []
    for logits, _, keys in _blocks(q, k, scale, first, window):
        lse = logits.logsumexp(-1)
        weights = logits.sub_(lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()
        outs.append(_mixed(weights, v[:, :, keys]))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def windowed_sums(
    q: Tensor, k: Tensor, lse: Tensor, scale: float, first: int, window: int
) -> Tensor:
    """Sum the softmax weights that each key receives from all queries that see it, as in
    `windowed_attention`: query t sees the last `window` keys up to key `first` + t. Each softmax
    divides by exp(lse), so it may also cover keys that are not in k.

    q [B H T D], k [B G S D], lse [B H T] -> [B H S] (fp32)"""
    sums = q.new_zeros(*q.shape[:2], k.shape[2], dtype=torch.float32)
    for logits, queries, keys in _blocks(q, k, scale, first, window):
        sums[:, :, keys] += logits.sub_(lse[:, :, queries].unsqueeze(-1)).exp_().sum(2)
    return sums


def column_sums(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return how much attention each key receives: its causal softmax weights summed over the
    queries, which are the last T of S tokens.

    q [B H T D], k [B G S D] -> [B H S] (fp32)"""
    return prefill_attention_with_column_sums(q, k, k, scale)[1]


def prefill_attention_with_column_sums(
    q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of the last T of S tokens together with its column sums, the
    attention that each key receives, so that the logits are computed once.

    q [B H T D], k [B G S D], v [B G S Dv] -> [B H T Dv], [B H S] (fp32)"""
    stored = k.shape[2]
    sums, outs = q.new_zeros(*q.shape[:2], stored, dtype=torch.float32), []
    for logits, _, keys in _blocks(q, k, scale, stored - q.shape[2], stored):
        weights = logits.softmax(-1)
        sums[:, :, keys] += weights.sum(2)
        outs.append(_mixed(weights, v[:, :, keys]))
    return torch.cat(outs, 2), sums


def room_by_token(q: Tensor) -> Tensor:
    """Return memory for the attention of queries q [B H T D], which lies there as [B T H D], as the
    output projection needs it."""
    batch, heads, tokens, dim = q.shape
    return q.new_empty((batch, tokens, heads, dim)).transpose(1, 2)


def queries_at_once(heads: int, keys: int) -> int:
    """Return for how many queries of `heads` heads, those of all sequences, the weights of so many keys
    are made at a time."""
    return min(_QUERIES_AT_ONCE, max(_LEAST_QUERIES, _WEIGHTS_AT_ONCE // (heads * keys)))


def _mixed(weights: Tensor, v: Tensor) -> Tensor:
    """Return values v [B G s D] weighted by weights [B H t s] (fp32), in the dtype of v: [B H t D]"""
    batch, heads, new, seen = weights.shape
    folded = weights.view(batch, v.shape[1], heads * new // v.shape[1], seen)
    return (folded @ v.float()).view(batch, heads, new, -1).to(v.dtype)


def _blocks(
    q: Tensor, k: Tensor, scale: float, first: int, window: int
) -> Iterator[tuple[Tensor, slice, slice]]:
    """Yield for one block of queries after the other: their scaled logits [B H t s] (fp32), the
    slice of the t queries, and the slice of the s keys that some of them see. Query t sees the last
    `window` keys up to key `first` + t; other logits are minus infinity.

    The query heads of a group are folded into the token axis, so no key is repeated. The caller may
    overwrite the logits: they are most of the memory that is taken here."""
    (batch, heads, new, dim), (groups, stored) = q.shape, k.shape[1:3]
    keys_at_most = max(1, min(window + _QUERIES_AT_ONCE, stored))
    at_once = queries_at_once(batch * heads, keys_at_most)
    for start in range(0, new, at_once):
        queries = slice(start, min(start + at_once, new))
        places = first + torch.arange(new, device=q.device)[queries]
        begin = min(max(0, first + queries.start - window + 1), stored)
        keys = slice(begin, max(begin, min(first + queries.stop, stored)))
        folded = q[:, :, queries].reshape(batch, groups, -1, dim).float()
        logits = (folded @ k[:, :, keys].float().transpose(-1, -2)).mul_(scale)
        logits = logits.view(batch, heads, len(places), keys.stop - keys.start)
        behind = places.unsqueeze(1) - torch.arange(stored, device=q.device)[keys]
        yield logits.masked_fill_((behind < 0) | (behind >= window), float("-inf")), queries, keys
