"""Defines in plain torch the operations that estimate the weights of chosen tokens by keys in 4 bits,
and say which tokens carry a share of them (Twilight, arXiv 2502.02770).

A copy of the keys has an offset and a step for each token, as in the released code. The softmax goes
over all that the step might read: candidates by their copies, and by exact keys the tokens that are
always read, such as sinks, window and answer. Where query heads share candidates, what any of them
needs is read for all, which is the paper's union over a group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import ops
from kernels.quantise import dequantise, pack, quantise, refuse

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


def estimated_logits(q: Tensor, keys: KeyCodes, rows: Tensor) -> Tensor:
    """Multiply queries with the quantised keys of chosen tokens. q [B G g D]; rows [B G|H K] ->
    [B G g K], or [B H 1 K] if each query head has rows of its own (fp32)"""
    of_group = rows.reshape(*q.shape[:2], -1)
    packed, spans = (ops.gather_rows(x, of_group).view(*rows.shape, -1) for x in keys)
    least, step = spans.split(1, -1)
    decoded = dequantise(packed, least, step, BITS, torch.float32)
    return q.float().reshape(*rows.shape[:2], -1, q.shape[3]) @ decoded.mT


def carrying(logits: Tensor, always: Tensor, mass: float) -> Tensor:
    """Return a mask of the candidates that a step reads, [B C K]. Each query head needs the fewest
    candidates that carry a share `mass` of its softmax together with the tokens that are always
    read. What any of the h query heads needs is read. logits [B C h K] of the candidates, minus
    infinity for missing ones; always [B C h]: the log-sum-exp of the tokens that are always read"""
    # in fp32 the sums of many weights are off
    both = torch.cat([always.unsqueeze(-1), logits], -1).double()
    first, weights = both.softmax(-1).split([1, logits.shape[3]], -1)
    ordered, order = weights.sort(stable=True, dim=-1, descending=True)
    before = first + ordered.cumsum(-1) - ordered
    carries = (before < mass) | (mass == 1)  # rounded sums may reach 1 before the last token
    read = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, carries)
    return (read & (logits > float("-inf"))).any(2)
