"""H2O: keeps the heavy hitters, the tokens that received most attention, and the recent ones (arXiv
2306.14048).

The rule: a token's score is its column sum: the softmax weights that it received from every query
so far, summed over the query heads of a KV head. (The sum over heads is that of PQCache's
comparison; the paper of H2O has no grouped heads.) The tokens with the largest sums and the most
recent ones stay. Kept keys stay at their positions.

The prompt is evicted once, at its seal, while the paper evicts with each token, as here with
evict_every=1. `compensation` makes it PQCache's H2O(C), which may keep more than the budget because
it moves nothing: with s prompt tokens, s/128 more (`literal`, which takes the share of the cache in
the text at its word) or s/256 more (`bytes`, since the other methods' extra transfer is 1/128 of
the keys alone). Sums are computed in fp32; the released code's fp16 sums overflow at sinks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kernels import ops, sink_logits
from kernels.reference import Segment
from methods.abilities.kept_codec import KeptCodec
from methods.base import AttnInput, Cost, CostError, LayerWorkload, Plan
from methods.layers import Keep, Padded, Storage, between_ends, ends
from methods.layers.windowed import Windowed
from methods.parts import costs

EXTRA = {"none": 0.0, "literal": 1 / 128, "bytes": 1 / 256}


class H2OKeep(Keep, capturable=True, of_each={"received": Padded(2)}):
    """Add up the attention that every stored token receives, in the prompt and in decode steps;
    evict the tokens with the smallest sums at the prompt's end, and their sums with them."""

    by_room = {"received": 2}
    method: H2O

    def bind(self, layer: Storage) -> None:
        super().bind(layer)
        shape = (self.request.batch, self.spec.num_kv_heads, self.request.capacity)
        # [B G C], attention per stored token
        self.received = torch.zeros(shape, device=self.request.device)

    def observe(self, x: AttnInput) -> None:
        self._count(
            sink_logits.column_sums(x.q, self.store.k, self.spec.scale, self.spec.sink_logits)
        )

    def prefill(self, x: AttnInput) -> Tensor:
        out, sums = sink_logits.causal_attention_with_column_sums(
            x.q, self.store.k, self.store.v, self.spec.scale, self.spec.sink_logits
        )
        self._count(sums)
        return out

    def decode(self, x: AttnInput) -> Tensor:
        stored, far = self.store.since(0), self.layer.far
        if far is not None:  # each key gets a weight, so those in fewer bits are decoded
            plain, coded = stored, far.whole().wait()
            k, v = (torch.cat(side, 2) for side in zip(coded[:2], plain[:2], strict=True))
            live = None if plain.live is None else plain.live + far.length
            stored = Segment(k, v, live=live)
        out, lse = sink_logits.segment_attention_with_lse(
            x.q, [stored], self.spec.scale, self.spec.sink_logits
        )
        ops.add_received(self.received, x.q, stored.k, lse, self.spec.scale, stored.live)
        return out

    def together_refusal(self) -> str | None:
        coded = self.layer.far is not None
        return (
            "H2O decodes for one sequence after the other" if coded else super().together_refusal()
        )

    def _count(self, sums: Tensor) -> None:
        """Add the attention that the stored tokens received in this call. sums [B H S], summed here
        over the query heads of each KV head"""
        grouped = sums.unflatten(1, (self.spec.num_kv_heads, -1)).sum(2)
        self.received[..., : grouped.shape[-1]].add_(grouped)

    def size(self, budget: int) -> int:
        return budget + int(EXTRA[self.method.compensation] * self.layer.seen)

    def keep(self, size: int) -> Tensor:
        plan = self.method.split(size)
        middle = self.received[..., plan.sinks : self.store.length - plan.local]
        rows = between_ends(ops.top_k(middle, plan.top), plan, self.store.length)
        kept = self.received.gather(2, rows)
        self.received = kept.new_zeros(
            *kept.shape[:2], size + self.request.capacity - self.layer.seen
        )
        self.received[..., :size] = kept
        return rows

    def keep_generated(self, count: int, size: int) -> Tensor:
        """Return which `size` of the last `count` stored tokens, the generated ones, each KV head
        keeps, [B G size]: the latest, and of the others those that received the most attention."""
        plan = Plan(0, int(size * self.method.recent_ratio), 0)
        received = self.received[..., self.layer.stored - count : self.layer.stored - plan.local]
        return between_ends(ops.top_k(received, size - plan.local), plan, count)

    def forget(self, count: int, rows: Tensor) -> None:
        start = self.layer.stored - count
        kept = self.received[..., start:].gather(2, rows)
        self.received[..., start:] = 0
        self.received[..., start : start + rows.shape[2]] = kept

    def state(self) -> dict[str, Tensor]:
        return {"received": self.received[..., : self.layer.stored]}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.received[..., : self.layer.stored] = state["received"]

    def truncate(self, state: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        return {"received": ends(state["received"], first, last)}


@dataclass(frozen=True, kw_only=True)
class H2O(Windowed):
    """Define H2O, which keeps the tokens that received most attention and the most recent ones, by
    its parameters. `sinks`, `recent_ratio`: how many first and what share of recent tokens are kept
    in any case. `compensation`: what is kept beyond the budget, in return for moving no tokens:
    none, or 1/128 (`literal`) or 1/256 (`bytes`) of the prompt."""

    policies = (H2OKeep,)
    takes = {KeptCodec: None}

    sinks: int = 0
    recent_ratio: float = 0.5
    compensation: Literal["none", "literal", "bytes"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compensation not in EXTRA:
            raise ValueError(
                f"compensation={self.compensation!r} is unknown: choose one of {', '.join(EXTRA)}."
            )

    def cost(self, case: LayerWorkload) -> Cost:
        most = case.budget + int(EXTRA[self.compensation] * case.sealed)
        kept = case.sealed if self.reads_whole(case) else min(case.sealed, most)
        rows = case.spec.num_kv_heads * (kept + case.reserve)
        return costs.evict(case, kept) + Cost(costs.FP32 * rows)

    def at_communication(self, share: float, head_dim: int) -> H2O:
        """Return H2O(C), which keeps 1/128 of the prompt beyond the budget: so the paper of PQCache
        (arXiv 2407.12820) compensates H2O, which moves nothing to choose tokens, for the `share` of
        the key cache that other methods move in each step."""
        if share != 1 / 128:
            raise CostError(
                f"comm={share} has no H2O(C): the paper compensates comm=0.0078125 (1/128) alone."
            )
        return replace(self, compensation="literal") if self.compensation == "none" else self
