"""DSA: reads the tokens that the model's own indexer scores best, as the model was trained to
(DeepSeek-V3.2, arXiv 2512.02556; GLM-5).

The rule: beside each token lies a small index key. An indexer multiplies it with a few small queries
of the new token, takes negative products as 0, and adds them up with weights that the new token
gives. Every query, those of the prompt as well, reads the tokens with the largest sums, of prompt
and answer together and perhaps itself. All heads share the choice. Some layers of GLM-5 have no
indexer and read what the layer before them has chosen.

The budget limits both kinds of tokens, since the choice is among both. Unless one is named, it is the
model's own `index_topk`, and `model.generate` gives the same tokens; a smaller one cuts the same
ranking. (Of equal sums, either may take another token.) Other methods run on the same model as if it
had no indexer, with dense attention.

Storage: index keys stay on the device, as the model computes them (256 bytes per token and layer of
DeepSeek-V3.2 in 16 bits; its own kernels hold 132, in 8 bits with a scale). They are rotated, and a
history that loses its oldest tokens is computed anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from kernels import ops
from kernels.per_sequence import PerSequence
from kernels.ragged import Ragged, filled
from kernels.reference import without_missing
from methods.abilities.bounded_answer import BoundedAnswer, CountedAnswer
from methods.abilities.kept_codec import KeptCodec
from methods.base import (
    Attended,
    AttnInput,
    Budget,
    BudgetError,
    CacheState,
    Cost,
    Index,
    KVLayer,
    LayerSpec,
    LayerWorkload,
    Reading,
)
from methods.base.pieces import pieces
from methods.layers import Layer, Policy, PolicyMethod, Read
from methods.layers.storage import Storage
from methods.layers.weights import ChoiceWeights
from methods.parts import costs
from methods.pools import KVStore
from methods.pools.batched import BatchedStore

_AT_ONCE = 1 << 22  # products of queries of a prompt with keys


class ReadOfBoth(CountedAnswer):
    """Count what a step reads of prompt and answer in the budget, though no row is dropped."""

    def start(self, layer: KVLayer) -> None:  # type: ignore[override]
        """Need no policy."""


class IndexKeys(KVStore):
    """Hold the index keys of a layer [B 1 S Di]."""

    @classmethod
    def of(cls, spec: LayerSpec, cache: CacheState, *keys: Tensor, room: int) -> IndexKeys:
        """Return a store of `keys` [B 1 T Di], one after the other, with room for so many more."""
        assert spec.indexer is not None
        width = spec.indexer.channels
        shape = replace(spec, num_kv_heads=1, head_dim=width, value_dim=width, values_in_keys=True)
        store = cls(shape, cache, room + sum(part.shape[2] for part in keys))
        for part in keys:
            store.append(part, part)
        return store

    def batched(
        self,
        stores: Sequence[KVStore],
        cache: CacheState,
        seen: int | PerSequence,
        dead: int | None,
    ) -> BatchedStore:
        """Return what writes and reads the keys of several caches in steps that they take together."""
        return BatchedStore(stores, cache, dead)


class DSARead(Read[int], capturable=True, of_each={"keys": None}):
    """Read, in each step and for each query of a prompt, the tokens that the model's indexer scores
    best. The plan is how many tokens of prompt and answer that is at most."""

    diagnostics = (*Read.diagnostics, "of_prompt", "index")
    method: DSA
    keys: KVStore | None = None  # None: all is read, or another layer chooses
    source: DSARead | None = None  # the policy of the layer that chooses for this one
    followed = False  # this layer chooses for others
    # the choice of each query of the last chunk of a prompt, for layers that follow
    of_prompt: Sequence[tuple[slice, Tensor]] = ()
    index: Index | None = None  # of the token of the current step

    def bind(self, layer: Storage) -> None:
        super().bind(layer)
        self.chooses = not self.request.covers_all(self.spec.index)

    def prefill(self, x: AttnInput) -> Tensor:
        self._take_in(x)
        top = self._most()
        if top is None or self.layer.seen <= top:
            return self.layer.attend_prompt(x.q)
        batch, heads, tokens, _ = x.q.shape
        out = x.q.new_empty(batch, tokens, heads, x.v.shape[3]).transpose(1, 2)
        for part, rows in self._choices(x, top):
            out[:, :, part] = self._attend_chosen(x.q[:, :, part], rows, x.start + part.start)
        return out

    def _choices(self, x: AttnInput, top: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield some queries of a prompt chunk after others, and the numbers of the tokens that each
        of these t queries reads, [B t K]: at most `top`, and besides them later ones, if there are
        too few."""
        if self.source is not None:
            yield from ((part, rows.to(x.q.device).long()) for part, rows in self.source.of_prompt)
            return
        assert self.keys is not None
        assert x.index is not None
        q, weights, keys = x.index.q.float(), x.index.weights.unsqueeze(-1), self.keys.k.float()
        of_query = q.shape[1] * keys.shape[2] + (self.spec.num_heads + self.spec.head_dim) * top
        self.of_prompt, kept = (), list[tuple[slice, Tensor]]()
        for part in pieces(q.shape[2], at_once=max(1, _AT_ONCE // (len(q) * of_query))):
            seen = self.layer.seen - q.shape[2] + part.stop
            scores = (q[:, :, part] @ keys[:, :, :seen].mT).relu_().mul_(weights[:, :, part]).sum(1)
            places = torch.arange(seen, device=q.device)
            later = places > places[seen - (part.stop - part.start) :].unsqueeze(1)
            rows = scores.masked_fill_(later, float("-inf")).topk(min(top, seen)).indices
            kept += [(part, rows.int())] * self.followed
            yield part, rows
        self.of_prompt = kept

    def _attend_chosen(self, q: Tensor, rows: Tensor, first: int) -> Tensor:
        """Attend from queries q [B H t D], at positions from `first` on, each to its own tokens rows
        [B t K] but for those that are later. Return [B H t Dv]."""
        batch, count, _ = rows.shape
        keys = ops.gather_rows(self.store.k, rows.view(batch, 1, -1)).float().view(*rows.shape, -1)
        logits = (q.transpose(1, 2).float() @ keys.mT) * self.spec.scale  # [B t H K]
        places = torch.arange(first, first + count, device=q.device)
        later = (rows > places.unsqueeze(1)).unsqueeze(2)
        weights = logits.masked_fill_(later, float("-inf")).softmax(-1)
        out = weights @ keys[..., self.spec.head_dim - self.spec.value_channels :]
        return out.to(q.dtype).transpose(1, 2)

    def seal(self, limit: int | None) -> None:
        self.plan, self.rows, self.arrival, self.of_prompt = self._most(), None, None, ()
        assert self.weights is not None
        self.weights.begin(self.plan is not None)

    def decode(self, x: AttnInput) -> Tensor:
        self._take_in(x)
        self.index = x.index
        out = super().decode(x)
        self.index = None
        return out

    def read(self, x: AttnInput, plan: int) -> Tensor:
        one = not self.cache.counters.running  # else as many are stored as the plan says
        rows = self.chosen(x.q, min(plan, self.layer.stored) if one else plan)
        if self.layer.far is None:
            return self.attend(x.q, self.store.since(0)._replace(rows=rows, live=None))
        answer = filled(rows) - self._sealed(rows.device)
        added = torch.where(answer < 0, float("-inf"), 0.0)
        if isinstance(rows, Ragged):
            added = without_missing(added, rows.counts, float("-inf"))
        later = self.store.since(0)._replace(rows=answer.clamp(min=0), live=None, log_weights=added)
        return self.attend(x.q, self.weighted(self.fetch(rows)), later)

    def select(self, q: Tensor, top: int) -> Tensor:
        """Return the `top` best tokens of prompt and answer, [B 1 K], numbered from the first. Those of
        the answer have no log-weight, because only those of the prompt may lie elsewhere, and count
        as read of it."""
        if self.source is not None:
            assert self.source.rows is not None
            rows = self.source.rows
            rows = rows if isinstance(rows, Ragged) else rows.to(q.device)
        else:
            assert self.keys is not None
            assert self.index is not None
            held = self.keys.since(0)
            products = filled(ops.row_scores(self.index.q.transpose(1, 2), held.k)).relu()
            scores = (products * self.index.weights.mT.unsqueeze(-1)).sum(2)
            rows = ops.top_k(held.without_missing(scores, float("-inf")), top)
        assert self.weights is not None
        of_answer = filled(rows) >= self._sealed(q.device)
        self.weights.log_weights = torch.where(of_answer, float("-inf"), 0.0)
        return rows

    def _sealed(self, device: torch.device) -> int | Tensor:
        """Return how many tokens the prompt has, or for several sequences [B 1 1]."""
        sealed = cast(int | PerSequence, self.sealed)
        return sealed.on(device).view(-1, 1, 1) if isinstance(sealed, PerSequence) else sealed

    def _take_in(self, x: AttnInput) -> None:
        """Store the index keys of new tokens, which are in the layer's store already."""
        if not self.chooses or self.source is not None:
            return
        if x.index is None:
            raise ValueError("DSA needs what the model's indexer says of the new tokens (x.index).")
        if self.keys is None:
            self.keys = IndexKeys.of(self.spec, self.cache, room=self.request.capacity)
        self.keys.append(x.index.k, x.index.k)

    def _most(self) -> int | None:
        """Return how many tokens a query reads after those seen so far; None for all."""
        budget = self.request.budget
        if not self.chooses or budget is None:
            return None
        return budget.rows(self.layer.seen, self.spec.index)

    def split(self, budget: int) -> int:
        return budget

    def prepare(self, plan: int) -> None:
        """Do nothing: index keys come with their tokens."""

    def away(self, plan: int) -> tuple[int, int]:
        return 0, self.sealed

    def attended_under(self, plan: int) -> Attended:
        return Attended(plan, 0)

    def rows_of(self, rows: Tensor, plan: int) -> Tensor:
        return rows

    @property
    def reading(self) -> Reading:
        if self.plan is None or self.rows is None:
            return super().reading
        assert self.weights is not None
        prompt = self.weights.read_of_choice()
        return prompt, self.rows.shape[2] - prompt

    def readings(self, steps: int) -> Reading:
        if self.plan is None or self.rows is None:
            return super().readings(steps)
        assert self.weights is not None
        prompt = self.weights.take_count(steps, 0)
        rows = cast(Tensor | Ragged, self.rows)
        count = rows.counts if isinstance(rows, Ragged) else rows.shape[2]
        return prompt, steps * count - prompt

    def check_choice(self, rows: Tensor, top: int | None) -> None:
        self._check_selected(rows, self.sealed, None)

    def link(self, members: Sequence[Policy], joint: Mapping[int, Policy]) -> None:
        super().link(members, joint)
        if self.source is not None:
            self.source = cast(DSARead, joint[id(cast(DSARead, members[0]).source)])

    def capture_refusal(self) -> str | None:
        if self.plan is not None and self.plan > self.layer.stored:
            return f"its budget of {self.plan} covers the prompt, and perhaps not the answer"
        return super().capture_refusal()

    def count_replayed(self, steps: int) -> None:
        if self.keys is not None:
            self.keys.advance(steps)

    def grow(self, more: int) -> None:
        super().grow(more)
        if self.keys is not None:
            self.keys.resize(self.request.capacity - self.keys.length)

    def state(self) -> dict[str, Tensor]:
        return {} if self.keys is None else {"index_keys": self.keys.k}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if (keys := state.get("index_keys")) is not None:
            room = self.request.capacity - keys.shape[2]
            self.keys = IndexKeys.of(self.spec, self.cache, keys, room=room)

    def truncate(self, state: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        raise ValueError(
            "Index keys of DSA are rotated to where their tokens stand: set overflow.by=truncate_tokens."
        )


@dataclass(frozen=True, kw_only=True)
class DSA(PolicyMethod):
    """Define the trained sparse attention of a model that has an indexer. It has no parameters: the
    budget is the model's `index_topk` unless another is named."""

    policies = (DSARead, ChoiceWeights)
    abilities = (ReadOfBoth(),)
    takes = {KeptCodec: None, BoundedAnswer: "its indexer chooses among all generated tokens"}
    dense_prefill = False
    by_query = True
    truncates = False
    offloads = True

    def trained_budget(self, spec: LayerSpec) -> int | None:
        return None if spec.indexer is None else spec.indexer.top

    def check_model(self, spec: LayerSpec) -> None:
        if spec.indexer is None:
            raise ValueError(
                "DSA reads what a model's own indexer chooses, as those of DeepSeek V3.2 and GLM-5 do, and this model "
                "has none: choose another method, such as Quest."
            )

    def check(self, budget: Budget | None, layer: int = 0) -> None:
        super().check(budget, layer)
        if budget is not None and budget.dense_layers:
            raise BudgetError(
                f"dense_layers={list(budget.dense_layers)} would let layers of DSA read what they were not trained to "
                "read, and others may follow their choice: leave it out."
            )

    def cost(self, case: LayerWorkload) -> Cost:
        """Return the bytes that a layer's cache takes, moves and reads: an upper bound, because tokens
        of the answer are chosen in place of some of the prompt."""
        chooses = case.budget < case.sealed or (case.rows or case.capacity) < case.capacity
        if not chooses:
            return costs.dense(case)
        indexer = case.spec.indexer
        key = indexer.channels * case.element_bytes if indexer is not None and indexer.own else 0
        held = Cost(case.dense_bytes + key * case.capacity)
        held = held.reading(case.budget * case.row_bytes + key * case.sealed)
        return held + costs.sent_away(case, case.sealed, case.budget)

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        layers = cast(list[Layer], super().start(specs, cache))
        reads = [cast(DSARead, layer.reads) for layer in layers]
        for before, read in pairwise(reads):
            if read.spec.indexer is not None and not read.spec.indexer.own:
                read.source = before.source or before
                read.source.followed = True
        return list[KVLayer](layers)
