"""Defines what a layer holds: keys and values of prompt and generated tokens, on the device or
elsewhere, and attention over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import ops, sink_logits
from kernels.ragged import filled
from kernels.reference import Segment
from methods.base import AttnInput, CacheState, KVLayer, LayerSpec, Method
from methods.layers.dropped import Dropped
from methods.layers.indices import gather_per_head, union_per_kv_head
from methods.layers.returned import check_rows, check_rows_per_head
from methods.pools import KVStore, PerHeadPool, PerHeadStore, Pool
from methods.tiers.block import FAR, tokens_in
from methods.tiers.codec import Part

# name of the row in the store before which the tokens belong that were sent away
FIRST = f"{FAR}.first"


class Storage(KVLayer):
    """Hold keys and values of one layer. Stored tokens lie in `store`, on the device and in order,
    except for a range of the prompt that may have moved to the pool `far`, on another tier or in
    fewer bits."""

    diagnostics = ("positions", "dropped")
    far: Pool | None = None  # holds tokens of the sealed prompt from `first_far` on
    first_far = 0
    evicted = 0  # tokens that have left for good
    # [B G K], where the first stored tokens stood, -1 where a head has fewer
    positions: Tensor | None = None
    # rows that the store is to have room for, at most; None: for all tokens that may come
    most: int | None = None

    def __init__(self, spec: LayerSpec, cache: CacheState, method: Method) -> None:
        super().__init__(spec, cache)
        method.check(self.request.budget, spec.index)
        self.method = method
        self.store = KVStore(spec, self.cache, 0)  # until the first token comes
        self.closed = False  # sealed, and no further turn has begun
        self.sealed = 0  # stored tokens that belong to the sealed prompt
        self.prompt_rows = 0  # tokens of the sealed prompt that are in `store`
        self.seen = 0  # tokens taken in so far
        self.dropped = Dropped()  # by decode steps since the last seal

    @property
    def stored(self) -> int:
        """Return how many tokens are held: those in the store on the device, and those that have
        left it for another tier or for fewer bits (the pool `far`)."""
        return self.store.length + self.away

    @property
    def away(self) -> int:
        """Return how many tokens have left the store on the device for another tier or for fewer
        bits (the pool `far`)."""
        return self.far.length if self.far is not None else 0

    @property
    def heads(self) -> int:
        """Return how many key-value pairs are stored per token: one per KV head, or one per query
        head once query heads keep different tokens."""
        return self.store.heads

    def spendable(self) -> int | None:
        """Return how many tokens the budget lets a step read if the prompt ends with those seen so
        far; None if a step reads all."""
        if (budget := self.request.budget) is None:
            return None
        tokens = budget.tokens(self.seen, self.spec.index)
        return (
            None
            if self.method.reads_all(self.seen, tokens, budget.prunes(self.spec.index))
            else tokens
        )

    def limit(self) -> int | None:
        """Return how many prompt tokens a step may read now that the prompt is complete; None for
        all. If all are read though the budget does not cover them, `fallback` is set to the
        reason."""
        self.fallback, limit, budget = None, self.spendable(), self.request.budget
        if limit is None and budget is not None and not budget.covers(self.seen, self.spec.index):
            self.fallback = self.method.whole_because(
                self.seen, budget.tokens(self.seen, self.spec.index)
            )
        return limit

    def room(self, stored: int) -> int:
        """Return for how many further tokens a store of `stored` tokens needs room."""
        room = self.request.capacity - self.seen
        return room if self.most is None else min(room, self.most - stored)

    def take_in(self, x: AttnInput) -> None:
        """Store the keys and values of new tokens; if query heads have copies of their own, each
        gets one. The store is allocated when the first token comes, so layers that a prompt has not
        reached yet take no memory."""
        if not self.seen:
            self.store = KVStore(self.spec, self.cache, self.request.capacity)
        self.seen += x.k.shape[2]
        if x.stored:
            self.store.count_written()
        else:
            k, v = x.k, x.v
            if (copies := self.heads // self.spec.num_kv_heads) > 1:
                k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
            self.store.append(k, v)

    def retain(self, rows: Tensor) -> None:
        """Drop all stored tokens except `rows`, [B G K] or [B H K], ascending, and shrink the store
        to them. With rows per query head, each query head gets a copy of its own."""
        self.check_rows("layer.retain was given", rows, self.store.length, ascending=True)
        whole, heads = self.store, rows.shape[1]
        self.positions = (
            self.stored_positions().repeat_interleave(heads // self.heads, 1).gather(2, rows)
        )
        kept = gather_per_head(whole.k, rows), gather_per_head(whole.v, rows)
        self.store = KVStore.holding(self.spec, self.cache, self.room(rows.shape[2]), kept)
        self.evicted += whole.length - rows.shape[2]
        self.sealed = rows.shape[2]

    def retain_per_head(self, rows: Sequence[Tensor]) -> None:
        """Drop stored tokens where KV heads keep different numbers of them. `rows`: a tensor [K]
        for every head, of the tokens that stay, ascending, one sequence after the other. Their
        total must be a multiple of the number of heads."""
        whole, room = self.store, self.room(sum(map(len, rows)) // len(rows))
        places = self.stored_positions().flatten(0, 1)  # a head with fewer tokens has them last
        stored = whole.per_head()
        if self.cache.checking:
            whose = f"In layer {self.spec.index} of {type(self.method).__name__}, layer.retain_per_head was given"
            check_rows_per_head(
                rows, whose, [len(k) for k, _ in stored], self.heads, self.request.device
            )
        heads = zip(places, stored, rows, strict=True)
        kept = [(place[-len(k) :][at], k[at], v[at]) for place, (k, v), at in heads]
        positions, keys, values = zip(*kept, strict=True)
        self.positions = _side_by_side(positions, self.request.batch)
        self.store = PerHeadStore(self.spec, self.cache, keys, values, room)
        self.evicted += whole.length - self.store.length
        self.sealed = self.store.length

    def rewrite(self, k: Tensor, v: Tensor) -> None:
        """Replace all stored keys and values by others that a method has computed from them, k, v
        [B G K D]. If there are as many as before they keep their positions in the text, else they
        have none (-1)."""
        if k.shape[2] != self.store.length:
            self.positions = torch.full(k.shape[:3], -1, device=k.device)
        self.evicted += self.store.length - k.shape[2]
        room = self.request.capacity - self.seen
        self.store = KVStore.holding(self.spec, self.cache, room, (k, v))

    def write(self, rows: Tensor, *, k: Tensor | None = None, v: Tensor | None = None) -> None:
        """Write keys k, values v or both [B heads K D] in place of those of the stored tokens rows
        [B heads K], in the prompt or in a step. They must not be changed otherwise: a cache that goes
        back to an earlier state, for another question or a likelihood, would keep the change."""
        reason = None
        if self.cache.counters.running:
            reason = "its policies' class lines say capturable or of_each: leave that out"
        elif v is not None and self.spec.values_in_keys:
            reason = "values are channels of this model's keys: write keys alone"
        elif self.method.rows_stay:
            reason = "it says rows_stay, so conversations would lose them: leave that out"
        elif isinstance(self.store, PerHeadStore):
            reason = "heads hold different numbers of them: keep equally many"
        if reason is not None:
            raise ValueError(
                f"{type(self.method).__name__} cannot write keys and values: {reason}."
            )
        self.check_rows("layer.write was given", rows, self.store.length, heads=(self.heads,))
        widths = {"k": self.spec.head_dim, "v": self.spec.value_channels}
        for name, x in (("k", k), ("v", v)):
            wanted = *rows.shape, widths[name]
            if x is not None and x.shape != wanted:
                raise ValueError(
                    f"In layer {self.spec.index} of {type(self.method).__name__}, layer.write was given {name} of "
                    f"shape {list(x.shape)}. Wanted is {list(wanted)}, one vector for each of `rows`."
                )
        self.store.write(rows, k, v)

    def check_rows(
        self,
        what: str,
        given: object,
        tokens: int | None,
        *,
        heads: Sequence[int] = (),
        **wanted: Any,
    ) -> None:
        """Raise `ReturnedError` if `given`, which a method returned, is not what is `wanted` (as in
        `returned.check_rows`). It does so only in a run's first example. `what`: which call
        returned it, such as "MyKeep.keep returned". `tokens`: the numbers must lie below it.
        `heads`: the allowed numbers of heads; by default one per stored pair of K and V, or one per
        query head."""
        if self.cache.checking:
            whose = f"In layer {self.spec.index} of {type(self.method).__name__}, {what}"
            wanted |= {"heads": heads or (self.heads, self.spec.num_heads), "tokens": tokens}
            check_rows(given, whose, batch=self.request.batch, device=self.request.device, **wanted)

    def send_away(self, first: int, end: int) -> Segment:
        """Move the stored tokens from `first` up to `end` out of the store to the pool `far`, which
        may lie on another tier or quantise them. Return their keys and values, still on the
        device."""
        whole = self.store
        before, tokens, after = (
            whole.between(*ends) for ends in pairwise((0, first, end, whole.length))
        )
        self.far, self.first_far = self.new_pool(end - first), first
        self.far.append(tokens.k, tokens.v)
        self.store = KVStore.holding(self.spec, self.cache, whole.free, before[:2], after[:2])
        return tokens

    def new_pool(self, room: int) -> Pool:
        """Return an empty pool with room for `room` tokens that leave the store. A subclass
        overrides it to use another codec."""
        return Pool(replace(self.spec, num_kv_heads=self.heads), self.cache, room)

    def bring_back(self) -> None:
        """Move the tokens that lie on another tier or in fewer bits (the pool `far`) back to their
        place in the store, decoded."""
        if self.far is None:
            return
        resident, first, room = self.store, self.first_far, self.request.capacity - self.seen
        if isinstance(self.far, PerHeadPool):
            keys, values = zip(*self._plain_heads(), strict=True)
            self.store, self.far = PerHeadStore(self.spec, self.cache, keys, values, room), None
            return
        before, after = resident.between(0, first), resident.between(first, resident.length)
        parts = (before[:2], self.far.whole().wait()[:2], after[:2])
        self.store, self.far = KVStore.holding(self.spec, self.cache, room, *parts), None

    def contents(self) -> dict[str, Tensor]:
        """Return all stored tensors by name, as views where they lie: `k0`, `v0`, ... of the store
        (one pair, or one per head if heads differ, and then decoded; keys alone if they hold values),
        those of the pool `far` as it encoded them, and what is needed to know the tokens'
        positions."""
        heads = (
            self._plain_heads()
            if isinstance(self.store, PerHeadStore)
            else [(self.store.k, self.store.v)]
        )
        tensors = {
            f"{name}{head}": x
            for head, both in enumerate(heads)
            for name, x in zip(self._sides, both, strict=False)
        }
        if self.evicted:
            tensors["positions"] = self.stored_positions()
        if self.far is not None and not isinstance(self.far, PerHeadPool):
            tensors |= {f"{FAR}.{name}": x for name, x in self.far.held().items()}
            tensors[FIRST] = torch.tensor(self.first_far)
        return tensors | {"seen": torch.tensor(self.seen)}

    @property
    def _sides(self) -> str:
        """Return the letters of what is stored of a token: its key, and its value if keys do not hold
        it."""
        return "k" if self.spec.values_in_keys else "kv"

    def _plain_heads(self) -> list[tuple[Tensor, Tensor]]:
        """Return all keys and values [S D] of every KV head with a store of its own, decoded, one
        sequence after the other."""
        stored = self.store.per_head()
        if not isinstance(self.far, PerHeadPool):
            return stored
        pairs = zip(self.far.per_head(), stored, strict=True)
        return [(torch.cat([old_k, k]), torch.cat([old_v, v])) for (old_k, old_v), (k, v) in pairs]

    def refill(self, contents: Mapping[str, Tensor]) -> None:
        """Restore, in a new layer that has seen no token, what `contents` of another layer
        returned."""
        heads = sum(name[:1] == "k" and name[1:].isdigit() for name in contents)
        sides = [[contents[f"{side}{head}"] for head in range(heads)] for side in self._sides]
        k, v = sides[0], sides[-1]
        seen = int(contents["seen"])
        far = {
            key.partition(".")[2]: x
            for key, x in contents.items()
            if key.startswith(f"{FAR}.") and key != FIRST
        }
        room = 0 if far else self.request.capacity - seen
        if k[0].dim() == 2:  # one pair per head, which may be the only one
            self.store = PerHeadStore(self.spec, self.cache, k, v, room)
        else:
            self.store = KVStore.holding(self.spec, self.cache, room, (k[0], v[0]))
        if far:
            self.first_far = int(contents[FIRST])
            self.far = self.new_pool(tokens_in(far))
            self.far.take(far)
        self.sealed, self.prompt_rows = self.stored, self.store.length
        self.seen, self.evicted = seen, seen - self.stored
        self.positions = contents.get("positions")

    def attend_prompt(self, q: Tensor) -> Tensor:
        """Attend causally to everything stored, from queries of the last T stored tokens, q
        [B H T D] -> [B H T D]."""

        def attend(q: Tensor, store: KVStore, head: int | None) -> Tensor:
            return sink_logits.causal_attention(
                q, store.k, store.v, self.spec.scale, self.spec.sinks_of(head)
            )

        return self.store.each(q, attend)

    def attend_all(self, q: Tensor) -> Tensor:
        """Attend from one query to all tokens held, also to those on another tier or in fewer bits
        (the pool `far`), q [B H 1 D] -> [B H 1 D]."""
        away = repeat([]) if self.far is None else iter(self.far.by_store())

        def attend(q: Tensor, store: KVStore, head: int | None) -> Tensor:
            segments, sinks = [*next(away), store.since(0)], self.spec.sinks_of(head)
            return sink_logits.segment_attention(q, segments, self.spec.scale, sinks)

        return self.store.each(q, attend)

    def attend(self, q: Tensor, *segments: Part) -> Tensor:
        """Attend from one query to all of `segments`, under one softmax, q [B H 1 D] ->
        [B H 1 D]."""
        return sink_logits.segment_attention(q, segments, self.spec.scale, self.spec.sink_logits)

    def weights(self, q: Tensor, segment: Segment, lse: Tensor) -> Tensor:
        """Return the attention weights of one query q [B H 1 D] on a segment's tokens, [B H S]
        fp32. `lse` [B H] is the log-sum-exp of the whole softmax, of which the segment may be a
        part. Tokens that a sequence does not have get 0."""
        logits = filled(
            ops.row_scores(q.view(*segment.k.shape[:2], -1, q.shape[3]), segment.k)
        ).flatten(1, 2)
        return segment.without_missing((logits * self.spec.scale - lse.unsqueeze(-1)).exp(), 0)

    def stored_positions(self) -> Tensor:
        """Return where in the text every stored token stood, [B heads S], -1 where a head has fewer
        tokens."""

        def consecutive(start: int, end: int) -> Tensor:
            return torch.arange(start, end, device=self.request.device).expand(
                self.request.batch, self.heads, -1
            )

        prompt = consecutive(0, self.sealed) if self.positions is None else self.positions
        later = [] if self.dropped.later is None else [self.dropped.later]
        new = self.store.length - self.prompt_rows - sum(part.shape[2] for part in later)
        return torch.cat([prompt, *later, consecutive(self.seen - new, self.seen)], -1)

    def positions_of(self, rows: Tensor) -> Tensor:
        """Return where in the text stored prompt tokens stood, given their row numbers in the
        store, rows [B heads K] -> the same shape. -1 stays -1."""
        if self.positions is None:
            return rows
        per_head = self.positions.repeat_interleave(rows.shape[1] // self.positions.shape[1], 1)
        return per_head.gather(2, rows.clamp(min=0)).where(rows >= 0, -1)

    def generated_positions(self) -> Tensor | None:
        if self.dropped.prompt_left is not None:
            return self.dropped.of_answer(self.stored_positions())
        if self.dropped.later is None:
            return None
        prompt = self.sealed if self.positions is None else self.positions.shape[2]
        return self.stored_positions()[..., prompt:]

    def kept_positions(self) -> Tensor | None:
        """Return where in the text the stored prompt tokens stood, [B G K], -1 where a KV head has
        fewer. If query heads have copies of their own, a KV head has the tokens that any of its
        query heads has. None if no token was dropped."""
        if self.positions is None or self.heads == self.spec.num_kv_heads:
            return self.dropped.of_prompt(self.positions)
        return union_per_kv_head(self.positions, self.spec.num_kv_heads, self.evicted + self.sealed)


def _side_by_side(rows: Sequence[Tensor], batch: int) -> Tensor:
    """Stack lists of different lengths, one per head, as [batch heads K], with -1 before the
    shorter ones."""
    widest = max(map(len, rows))
    return torch.stack([pad(row, (widest - len(row), 0), value=-1) for row in rows]).unflatten(
        0, (batch, -1)
    )
