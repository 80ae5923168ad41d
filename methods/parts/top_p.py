"""Estimates the weights of chosen tokens by keys in 4 bits, and says which tokens carry a share of
them (Twilight, arXiv 2502.02770).

A copy of the keys has an offset and a step for each token, as in the released code. The softmax goes
over all that the step might read: candidates by their copies, and by exact keys the tokens that are
always read, such as sinks, window and answer. Where query heads share candidates, what any of them
needs is read for all, which is the paper's union over a group."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import ops
from kernels.quantise import dequantise, pack, quantise, refuse

BITS = 4
RANGE_BYTES = 4  # offset and step of a key, in fp16


def quantised_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each key to integers of 4 bits. keys [B G S D] -> packed codes [B G S D/2], and the
    least number and the step of each, [B G S 2] (fp16)"""
    codes, least, step, bad = quantise(keys, BITS)
    refuse(bad)
    return pack(codes, BITS), torch.stack([least, step], -1)


def estimated_logits(q: Tensor, codes: Tensor, ranges: Tensor, rows: Tensor) -> Tensor:
    """Multiply queries with the quantised keys of chosen tokens. q [B G g D]; codes and ranges as
    `quantised_keys` returns them; rows [B G|H K] -> [B G g K], or [B H 1 K] if each query head has
    rows of its own (fp32)"""
    of_group = rows.reshape(*q.shape[:2], -1)
    packed, spans = (ops.gather_rows(x, of_group).view(*rows.shape, -1) for x in (codes, ranges))
    least, step = spans.split(1, -1)
    keys = dequantise(packed, least, step, BITS, torch.float32)
    return q.float().reshape(*rows.shape[:2], -1, q.shape[3]) @ keys.mT


def carrying(logits: Tensor, always: Tensor, mass: float) -> Tensor:
    """Return which candidates a step reads, [B C K]: of each query head the fewest that, with the
    tokens that are always read, carry a share `mass` of the softmax over both. logits [B C h K] of
    the candidates, minus infinity for missing ones; always [B C h], the log-sum-exp of the others"""
    # in fp32 the sums of many weights are off
    both = torch.cat([always.unsqueeze(-1), logits], -1).double()
    first, weights = both.softmax(-1).split([1, logits.shape[3]], -1)
    ordered, order = weights.sort(stable=True, dim=-1, descending=True)
    before = first + ordered.cumsum(-1) - ordered
    carries = (before < mass) | (mass == 1)  # rounded sums may reach 1 before the last token
    read = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, carries)
    return (read & (logits > float("-inf"))).any(2)
