"""TOVA: drops the token to which the newest one attends least, with every token of the answer (arXiv
2401.06104).

The rule: when rows must go, the softmax weights of the last token's query are averaged over all
query heads of the layer, and the rows with the smallest weights go, the same in all heads. This
happens once at the seal, which leaves room in the budget for the next token, and then before each
further token, whose row then takes the place of the one that goes. Keys stay at their positions.
The last token's row always stays, as in kvpress; the authors' code would drop it if its own query
gave it the least weight."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import ops
from kernels.overwritten import LEFT, READ
from kernels.sink_logits import column_sums, segment_attention_with_lse
from methods.abilities.last_queries import EvictsWhileDecoding, LastQueries
from methods.base import AttnInput, Plan, Reading
from methods.layers import Padded, Policy, between_ends

OF_EACH = {"last": None, "row": None, "places": Padded(1), "counts": None}


class TOVAKeep(LastQueries, capturable=True, of_each=OF_EACH):
    """Keep the last token and those to which it attends most, on average over all query heads.

    While the model decodes, a full store takes no more rows. At the end of a step it is known which
    row goes next, and the next token is written there."""

    # None until the store is full
    row: Tensor | None = None  # [B], where the next token is written
    places: Tensor | None = None  # [B S], where in the text the token of each row stands
    counts: Tensor | None = None  # [B 4], as in kernels/overwritten.py
    noted: Tensor | int = 0  # of the prompt tokens that steps have read, those that were told

    def size(self, budget: int) -> int:
        return budget - 1  # the next token's row is in the budget

    def keep(self, size: int) -> Tensor:
        assert self.queries is not None
        # [B H S]
        weights = column_sums(self.queries, self.store.k, self.spec.scale, self.spec.sink_logits)
        plan = Plan(0, 1, size - 1)
        best = ops.top_k(weights[..., :-1].mean(1, keepdim=True), plan.top)
        return between_ends(best, plan, self.store.length).expand(-1, self.spec.num_kv_heads, -1)

    @property
    def overwrites(self) -> bool:
        """Return whether new tokens can be written over those that go. They cannot if a subclass
        chooses these by a rule of its own, or if another policy must be told."""
        told = any(type(policy).forget is not Policy.forget for policy in self.layer.policies)
        return type(self).keep is TOVAKeep.keep and not told

    def overwrite(self) -> None:
        """Write tokens over others from the next one on, which takes the only free row."""
        places, layer = self.layer.stored_positions()[:, 0], self.layer
        self.row = torch.full((len(places),), places.shape[1], device=places.device)
        self.places = pad(places, (0, 1), value=1 << 62)  # no place of the prompt
        left = (places < layer.dropped.end).sum(1)
        none = torch.zeros_like(left)
        self.counts = torch.stack([places[:, -1], left, none, none + layer.dropped.end], 1)
        self.last, self.noted, layer.dropped.later = None, 0, None
        self.store.overwrite(self.row)
        layer.prompt_rows = self.store.length
        self._share()

    def _share(self) -> None:
        """Give the layer the tensors that steps change."""
        assert self.places is not None
        assert self.counts is not None
        self.store.row = self.row
        self.layer.positions = self.places.unsqueeze(1).expand(-1, self.layer.heads, -1)
        self.layer.dropped.prompt_left = self.counts[:, LEFT]

    def decode(self, x: AttnInput) -> Tensor:
        if self.row is None:
            return super().decode(x)
        stored, scale = self.store.since(0), self.spec.scale
        out, lse = segment_attention_with_lse(x.q, [stored], scale, self.spec.sink_logits)
        logits = ops.row_scores(x.q.view(*stored.k.shape[:2], -1, x.q.shape[3]), stored.k)
        ops.pick_overwritten(logits, lse, scale, self.places, self.row, self.counts)
        return out

    def readings(self, steps: int) -> Reading:
        if self.counts is None:
            return super().readings(steps)
        before, self.noted = self.noted, self.counts[:, READ].double()
        prompt = self.counts[:, LEFT].double() if steps == 1 else self.noted - before
        return prompt, steps * self.store.length - prompt

    def form(self) -> Hashable:
        return super().form(), self.row is None

    def link(self, members: Sequence[Policy], joint: Mapping[int, Policy]) -> None:
        self.store.row = self.row

    def hand_back(self, member: Policy, own: slice) -> None:
        super().hand_back(member, own)
        if self.row is not None:
            assert isinstance(member, TOVAKeep)
            member._share()

    def state(self) -> dict[str, Tensor]:
        self._in_order()
        return super().state()

    def reopen(self) -> None:
        super().reopen()
        self._in_order()
        self.row = self.places = self.counts = self.store.row = None

    def _in_order(self) -> None:
        """Put rows that were written over others in the order of the text."""
        if self.row is None or self.places is None:
            return
        order = self.places.argsort(1)
        self.store.keep_of_last(
            self.store.length, order.unsqueeze(1).expand(-1, self.layer.heads, -1)
        )
        self.places = self.places.gather(1, order)
        self.row = (order == self.row.unsqueeze(1)).int().argmax(1)
        self.layer.evicted = self.layer.seen - self.layer.stored
        self._share()


@dataclass(frozen=True, kw_only=True)
class TOVA(EvictsWhileDecoding):
    """Define TOVA, which drops, with every token of the answer, the one that the newest token
    attends to least. It has no parameters."""

    policies = (TOVAKeep,)

    @property
    def smallest_budget(self) -> int:
        return 2
