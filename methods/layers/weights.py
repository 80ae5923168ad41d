"""Holds the log-weights of what a step chose, and counts how many of the chosen tokens are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import ops
from kernels.ragged import Ragged
from kernels.reference import Segment, without_missing
from kernels.sink_logits import lse_with_sink
from methods.base import KVLayer, LayerSpec
from methods.layers.policy import Policy


class ChoiceWeights(Policy, capturable=True, of_each={"choices_read": None}):
    """Hold numbers that are added to the scaled logits of the tokens that the layer's `Read` chose.
    A token with minus infinity is not read, so each head reads a number of tokens of its own. A
    `Read` whose layer has this policy sets `log_weights` in its `select`."""

    diagnostics = ("log_weights", "choices_read")
    prunes = False  # a choice among all tokens leaves some of them out
    layer: Any
    # fp32, of the shape of the last choice; None before the first one
    log_weights: Tensor | None = None
    # [B H] int64, chosen tokens that each list of a choice read since `take_count`
    choices_read: Tensor | None = None

    def begin(self, chooses: bool) -> None:
        """Start anew at the end of a prompt. `chooses`: steps will read a choice, and not all."""
        self.log_weights = self.choices_read = None
        if chooses:
            lists = self.request.batch, self.spec.num_heads
            self.choices_read = torch.zeros(lists, dtype=torch.int64, device=self.request.device)

    def weigh(self, q: Tensor, rows: Tensor) -> None:
        """Give weights to the choice `rows` that was just made for the query q [B H 1 D]: in this
        class those that `select` has set, in fixed shapes also where sequences choose different
        numbers of tokens."""
        if self.log_weights is not None and isinstance(rows, Ragged):
            self.log_weights = without_missing(self.log_weights, rows.counts, float("-inf"))

    @property
    def unread(self) -> Tensor | None:
        """Return a mask of the tokens of the last choice that are not read, [B G K] or [B H K]."""
        return None if self.log_weights is None else self.log_weights == float("-inf")

    def read_of_choice(self) -> Tensor:
        """Return how many tokens of the last choice a head reads, the mean over heads, [B] fp64."""
        assert self.log_weights is not None
        return (self.log_weights != float("-inf")).sum(-1).double().mean(1)

    def count(self) -> None:
        """Count the tokens of the choice that the current step reads."""
        assert self.choices_read is not None
        assert self.log_weights is not None
        lists = self.log_weights.shape[1]
        ops.count_read(self.log_weights, self.choices_read[:, :lists])

    def take_count(self, steps: int, always: float) -> Tensor:
        """Return the prompt tokens [B] that a head read in the last `steps` steps, `always` of them
        in each step whatever it chose, and begin to count anew."""
        assert self.choices_read is not None
        assert self.log_weights is not None
        lists = self.log_weights.shape[1]
        read = self.choices_read[:, :lists].double().mean(1) + steps * always
        self.choices_read.zero_()
        return read

    @property
    def bytes_read(self) -> int:
        """Return the bytes that the last step read to weigh its choice, besides keys and values."""
        return 0

    def hand_back(self, member: Policy, own: slice) -> None:
        super().hand_back(member, own)
        assert isinstance(member, ChoiceWeights)
        rows = member.layer.reads.rows
        if self.choices_read is not None:
            self.choices_read[own] = 0  # the member has them now
        if self.log_weights is not None and rows is not None:
            member.log_weights = self.log_weights[own, ..., : rows.shape[2]]


def always_lses(segments: Sequence[Segment], grouped: Tensor, spec: LayerSpec) -> Tensor:
    """Return numbers whose log-sum-exp is that of the logits of all tokens in `segments`, which every
    step reads, and of the sink logits if the model has them. grouped [B G g D] -> [B G g P]"""
    lses: Tensor = ops.log_sum_exps(grouped, [x for x in segments if x.k.shape[2]], spec.scale)
    if spec.sink_logits is None:
        return lses
    lse = lses.logsumexp(-1)
    return lse_with_sink(lse.flatten(1), spec.sink_logits).view_as(lse).unsqueeze(-1)


def counts_choices(layer: KVLayer) -> bool:
    """Return whether each head of `layer` reads as many chosen tokens as a step needs, so that their
    distribution is recorded besides their mean."""
    weights = getattr(getattr(layer, "reads", None), "weights", None)
    return weights is not None and weights.choices_read is not None
