"""Defines in plain torch the operations that estimate the weights of chosen tokens by keys in 4 bits,
and say which tokens carry a share of them (Twilight, arXiv 2502.02770).

A copy of the keys has an offset and a step for each token, as in the released code. The softmax goes
over all that the step might read: candidates by their copies, and by exact keys the tokens that are
always read, such as sinks, window and answer. Where query heads share candidates, what any of them
needs is read for all, which is the paper's union over a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import ops
from kernels.quantise import dequantise, pack, quantise, refuse
from kernels.ragged import Ragged, filled
from kernels.reference import Segment

BITS = 4
RANGE_BYTES = 4  # offset and step of a key, in fp16


class KeyCodes(NamedTuple):
    """Hold keys as integers of 4 bits. Sequences of different lengths have a `Ragged`, which holds a
    tensor per sequence, instead of each tensor."""

    codes: Tensor  # [B G S D/2] uint8, packed
    ranges: Tensor  # [B G S 2] fp16, the least number of each key and its step


def quantised_keys(keys: Tensor) -> KeyCodes:
    """Quantise each key [B G S D] to integers of 4 bits."""
    codes, least, step, bad = quantise(keys, BITS)
    refuse(bad)
    return KeyCodes(pack(codes, BITS), torch.stack([least, step], -1))


def estimated_logits(q: Tensor, keys: KeyCodes, rows: Tensor | Ragged) -> tuple[Tensor, Tensor]:
    """Multiply queries with the quantised keys of chosen tokens, minus infinity for those that a
    sequence with fewer rows does not have. q [B G g D]; rows [B G|H K] -> [B G g K], or [B H 1 K] if
    each query head has rows of its own (fp32), and numbers of which the largest is no less than any
    of a head, [... n], where n is left to the backend"""
    chosen, missing = existing(rows)
    of_group = chosen.reshape(*q.shape[:2], -1)
    packed, spans = (ops.gather_rows(x, of_group).view(*chosen.shape, -1) for x in keys)
    least, step = spans.split(1, -1)
    decoded = dequantise(packed, least, step, BITS, torch.float32)
    logits = q.float().reshape(*chosen.shape[:2], -1, q.shape[3]) @ decoded.mT
    return (without(logits, missing),) * 2


def existing(rows: Tensor | Ragged) -> tuple[Tensor, Tensor | None]:
    """Return rows [B C K], the first one in place of those that do not exist, and which these are."""
    if not isinstance(rows, Ragged):
        return rows, None
    missing = torch.arange(rows.shape[2], device=rows.device) >= rows.counts.view(-1, 1, 1)
    return rows.whole.masked_fill(missing, 0), missing


def without(logits: Tensor, missing: Tensor | None) -> Tensor:
    """Return logits [B C h K] with minus infinity for those that are `missing` [B 1|C K]."""
    return logits if missing is None else logits.masked_fill(missing.unsqueeze(2), float("-inf"))


def log_sum_exps(q: Tensor, segments: Sequence[Segment], scale: float) -> Tensor:
    """Return numbers whose log-sum-exp is that of all scaled products of each query with the keys of
    `segments`. q [B G g D] -> [B G g P] (fp32), where P is left to the backend"""
    logits = [
        part.without_missing(filled(ops.row_scores(q, part.k)) * scale, float("-inf"))
        for part in segments
    ]
    return torch.cat(logits, -1).logsumexp(-1, keepdim=True)


def carrying(logits: Tensor, tops: Tensor, always: Tensor, mass: float, scale: float) -> Tensor:
    """Return log-weights of the candidates, [B C K] (fp32): 0 for those that a step reads, and minus
    infinity for the others. Each query head needs the fewest candidates that carry a share `mass` of
    its softmax together with the tokens that are always read. What any of the h query heads needs is
    read. logits [B C h K] of the candidates, before the factor `scale`, minus infinity for missing
    ones; tops [B C h n]: numbers of which the largest is no less than any of them; always [B C h P]:
    numbers whose log-sum-exp is that of the tokens that are always read"""
    # in fp32 the sums of many weights are off
    scaled = logits * scale
    both = torch.cat([always.logsumexp(-1, keepdim=True), scaled], -1).double()
    first, weights = both.softmax(-1).split([1, logits.shape[3]], -1)
    ordered, order = weights.sort(stable=True, dim=-1, descending=True)
    before = first + ordered.cumsum(-1) - ordered
    carries = (before < mass) | (mass == 1)  # rounded sums may reach 1 before the last token
    read = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, carries)
    return log_weights((read & (logits > float("-inf"))).any(2))


def log_weights(read: Tensor) -> Tensor:
    """Return 0 for the tokens that are `read`, and minus infinity for the others, in fp32."""
    return torch.zeros(read.shape, device=read.device).masked_fill(~read, float("-inf"))


def count_read(log_weights: Tensor, counts: Tensor) -> None:
    """Add to counts [B C] (int64), in place, how many tokens of each list are read: those whose
    log-weight [B C K] is not minus infinity."""
    counts += (log_weights != float("-inf")).sum(-1)
