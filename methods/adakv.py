"""Ada-KV: evicts as SnapKV does, under one budget that the KV heads of a layer share by their votes
(arXiv 2407.11550).

The rule: the votes of all heads of a layer are ranked together, and the best are kept, as many as
all heads may keep: a head's share is the number of its tokens among them. A floor gives every head
a part of the even share, since a head with low votes would otherwise keep only the window. The mean
over the heads is the budget, to the last token.

The paper has no groups; its released code shares among all query heads by default, each with a copy
of its group's keys and values. Here the heads that share are KV heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kernels import ops
from kernels.per_sequence import PerSequence
from kernels.ragged import filled
from methods.pools import PerHeadStore
from methods.snapkv import SnapKeep, SnapKV


class AdaKeep(SnapKeep, capturable=True, of_each={"last": None}):
    """Evict tokens once the prompt is complete: of the tokens of all KV heads of a sequence
    together, keep those with the most votes (attention from the prompt's last queries), so that one
    head may keep more tokens than another."""

    method: AdaKV

    def evict(self, size: int) -> None:
        groups, window = self.spec.num_kv_heads, self.method.window
        heads = self._votes_per_head()
        votes = pad_sequence(heads, batch_first=True, padding_value=float("-inf"))
        lengths = [*map(len, heads)]
        counts: list[int] = []
        for first in range(0, len(heads), groups):
            of_sequence = slice(first, first + groups)
            counts += self.shares(votes[of_sequence], lengths[of_sequence], size - window)
        kept = PerSequence(counts)  # a head's votes stand where a sequence's scores do
        best = filled(ops.top_k(votes.unsqueeze(1), kept)).squeeze(1)
        beyond = torch.arange(kept.most, device=votes.device) >= kept.on(votes.device).unsqueeze(1)
        ends = (
            PerSequence(lengths).on(votes.device).unsqueeze(1)
            if len({*lengths}) > 1
            else lengths[0]
        )
        last = (ends + torch.arange(window, device=votes.device)).expand(len(heads), -1)
        rows = (
            torch.cat([best.masked_fill(beyond, votes.shape[1] + window), last], 1).sort(1).values
        )
        self.layer.retain_per_head(
            [row[: count + window] for row, count in zip(rows, counts, strict=True)]
        )

    def shares(self, votes: Tensor, lengths: Sequence[int], each: int) -> list[int]:
        """Return how many of its tokens before the window each KV head keeps, given their votes
        [G M]; a head has only as many as its entry in `lengths`, and minus infinity follows.
        `each`: how many a head keeps on average, so the numbers add up to each * heads. The host
        waits for the device once."""
        if self.method.normalize:
            known = votes.clamp(min=0)
            votes = votes * (
                known.topk(min(each, known.shape[1])).values.sum(1) / known.sum(1)
            ).unsqueeze(1)
        best = ops.top_k(votes.view(1, 1, -1), each * len(votes))[0, 0]
        owners = torch.arange(len(votes), device=votes.device).unsqueeze(1)
        won, floor = (best // votes.shape[1] == owners).sum(1).tolist(), self.method.floor
        return whole_shares([count * (1 - floor) + each * floor for count in won], lengths)

    def _votes(self) -> Tensor:
        if not isinstance(self.store, PerHeadStore):
            return super()._votes()
        votes = pad_sequence(self._votes_per_head(), True, float("-inf"), padding_side="left")
        return votes.unflatten(0, (-1, self.spec.num_kv_heads))

    def _votes_per_head(self) -> list[Tensor]:
        """Return the votes (attention from the last queries, pooled over neighbouring tokens) for
        every stored token except the window: one tensor [M] per KV head, one sequence after the
        other."""
        store = self.store
        if not isinstance(store, PerHeadStore):
            return [*self._votes().flatten(0, 1)]
        assert self.queries is not None
        queries = self.queries.unflatten(1, (store.heads, -1)).flatten(0, 1).split(1)
        heads = zip(queries, store.stores, cycle(range(store.heads)), strict=False)
        return [self.pooled_votes(*head)[0, 0] for head in heads]


@dataclass(frozen=True, kw_only=True)
class AdaKV(SnapKV):
    """Define Ada-KV, which evicts as SnapKV does and lets the KV heads of a layer share one budget,
    by its parameters: SnapKV's and two more. `floor`: the part of an even share that every head
    gets at least. `normalize`: whether a head's votes are first scaled by the part of them that its
    best tokens hold."""

    policies = (AdaKeep,)
    no_latents = "it shares a budget among KV heads, and latents are one"
    tunable = {**SnapKV.tunable, "floor": (0.0, 0.05, 0.2, 0.5)}

    floor: float = 0.2
    normalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= 1:
            raise ValueError(
                f"floor={self.floor} is not a part of the even share: give 0 to 1, 0.2 in the paper."
            )
        if self.select_per != "kv_head":
            raise ValueError("Ada-KV gives budgets to KV heads: leave select_per=kv_head.")


def whole_shares(asked: Sequence[float], most: Sequence[int]) -> list[int]:
    """Round `asked`, the tokens that each head is to keep, to whole numbers with the same sum,
    which must be whole. No head gets more than its entry in `most`, whose sum must be large
    enough."""
    given = [min(int(wish), limit) for wish, limit in zip(asked, most, strict=True)]
    for _ in range(round(sum(asked)) - sum(given)):
        open_heads = [head for head, limit in enumerate(most) if given[head] < limit]
        given[max(open_heads, key=lambda head: asked[head] - given[head])] += 1
    return given
