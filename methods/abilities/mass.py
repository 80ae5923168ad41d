"""Budgets by mass (Twilight, arXiv 2502.02770): of the tokens that a step chose, it reads only as
many as carry a given share of the attention weights. Copies of the keys in 4 bits estimate these
weights (kernels/top_p.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import ops
from kernels.ragged import filled
from kernels.top_p import RANGE_BYTES, KeyCodes, quantised_keys, without
from methods.base import Ability, BudgetError, KVLayer, Method
from methods.base.pieces import pieces, tokens_at_once
from methods.layers.weights import ChoiceWeights, always_lses


@dataclass(frozen=True)
class Mass(Ability):
    """Let a step read only as many of its chosen tokens as carry `share` of their estimated weights.
    The setting `budget_mass` adds it, as `Budget.mass`."""

    lacking = "it has no second stage that prunes what it chose by estimated weights"
    share: float

    def error(self, method: Method, why: str) -> ValueError:
        return BudgetError(
            f"{type(method).__name__} takes no budget_mass={self.share}, for {why}: leave it out, or "
            "choose Oracle, Quest or PQCache."
        )

    def start(self, layer: KVLayer) -> Pruned:
        return Pruned(self.share)


class Pruned(
    ChoiceWeights, capturable=True, of_each={"key_codes": 2, "key_ranges": 2, "choices_read": None}
):
    """Hold copies of the keys of all candidates in 4 bits. Give minus infinity as log-weight to
    those chosen tokens that are not needed to reach the share of the weights.

    The layer's `Read` answers three questions. `candidates()`: of which keys does a step choose,
    while they are still in the store? `always_read()`: which segments does every step read?
    `absent(rows)`: which entries of a choice stand for no token (a mask; None if all are
    tokens)?"""

    prunes = True
    key_codes: Tensor | None = None  # [B G M D/2], codes of the candidates' keys
    key_ranges: Tensor | None = None  # [B G M 2], their offsets and steps

    def __init__(self, share: float) -> None:
        self.share = share

    def begin(self, chooses: bool) -> None:
        super().begin(chooses)
        self.key_codes = self.key_ranges = None
        if chooses:
            keys = self.layer.reads.candidates().k
            parts = pieces(keys.shape[2], at_once=tokens_at_once(keys.device))
            written = [quantised_keys(keys[:, :, part]) for part in parts]
            self.key_codes, self.key_ranges = (torch.cat(x, 2) for x in zip(*written, strict=True))

    def weigh(self, q: Tensor, rows: Tensor) -> None:
        """Set the log-weights of a choice: 0 for the tokens that carry the share, which are read,
        and minus infinity for the others. q [B H 1 D], rows [B G|H K]"""
        assert self.key_codes is not None
        assert self.key_ranges is not None
        keys = KeyCodes(self.key_codes, self.key_ranges)
        reads = self.layer.reads
        absent = reads.absent(rows)
        chosen = rows if absent is None else rows.masked_fill(absent, 0)
        grouped = q.view(q.shape[0], self.spec.num_kv_heads, self.spec.group, -1)
        logits, tops = ops.estimated_logits(grouped, keys, chosen)
        logits = without(logits, absent)
        always = always_lses(reads.always_read(), grouped, self.spec)
        always = always.view(*logits.shape[:3], -1)
        self.log_weights = ops.carrying(logits, tops, always, self.share, self.spec.scale)

    @property
    def bytes_read(self) -> int:
        """Return the bytes of those copies of keys by which the last step estimated weights; 0 if
        it used an earlier choice again."""
        rows = self.layer.reads.rows
        if self.key_codes is None or rows is None or self.layer.reads.age:
            return 0
        return filled(rows).numel() * (self.key_codes.shape[3] + RANGE_BYTES)
