"""LM-Infinite: a window of near tokens and the first ones, no distance beyond the window (arXiv 2308.16137).

Every query, those of the prompt as well, reads the n_local tokens before it at their true distances and the first
`n_init` tokens; where these lie further back than the window, they are read as if they stood exactly n_local before
the query. So the prompt's outputs are not Full's: this method cannot take over a shared prefill.

The paper sets n_local to the length that the model was trained on. Here the budget sets it: n_init and n_local are the
budget together, after the seal the window is that of the prompt's end, and generated tokens come on top. A prefill in
several chunks spends the budget of what has come so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels import ops
from kernels.reference import Segment
from methods import costs
from methods.angles import Angles
from methods.base import AttnInput, Case, Cost, KVLayer, LayerSpec, Method, Request
from methods.card import Card
from methods.layers import EvictLayer, sinks_and_recent

_QUERIES_AT_ONCE = 256  # bounds the block of weights


@dataclass(frozen=True, kw_only=True)
class LMInfinite(Method):
    """n_init: first tokens always read; 10 and 100 gave the paper's authors the same."""

    dense_prefill: ClassVar[bool] = False
    exact_keys: ClassVar[bool] = False
    card: ClassVar[Card | None] = Card(
        prefill="sparse: windowed like a step",
        rule="evicts all but the first and the last tokens; no distance exceeds the window",
        unit="token",
        group_rule="the same tokens for all heads and layers",
        dense_layers="none",
        sinks="{n_init}",
        window="the rest of the budget",
        on_device="kept K and V, generated tokens, first keys before their rotation, cos and sin",
        on_host="nothing",
        index_cost="none",
        budget="first tokens and window",
        deviations="the budget sets the window, the paper's is the training length; generated tokens come on top",
    )

    n_init: int

    def __post_init__(self) -> None:
        if self.n_init < 0:
            raise ValueError(f"n_init={self.n_init} is negative: give the number of first tokens that are always read.")

    @property
    def smallest_budget(self) -> int:
        return self.n_init + 1

    def cost(self, case: Case) -> Cost:
        if self.reads_whole(case):
            return costs.dense(case) + costs.angles(case)
        first = costs.FP32 * self.n_init * case.spec.num_kv_heads * case.spec.head_dim
        return costs.evict(case, case.budget) + costs.angles(case) + Cost(first)

    def start(self, specs: Sequence[LayerSpec], request: Request) -> list[KVLayer]:
        angles = Angles(request)
        return [LMInfiniteLayer(spec, request, self, angles) for spec in specs]


class LMInfiniteLayer(EvictLayer):
    """Stored keys keep their true rotation; the first ones are turned anew for each query far from them."""

    method: LMInfinite
    n_local: int | None = None  # None: everything is read
    first_keys: Tensor  # [B G n_init D] before their rotation, fp32

    def __init__(self, spec: LayerSpec, request: Request, method: LMInfinite, angles: Angles) -> None:
        super().__init__(spec, request, method)
        self.angles = angles

    def absorb(self, x: AttnInput) -> None:
        raise ValueError("LM-Infinite cannot take over a shared prefill, for its own is windowed: run its prefill.")

    def prefill(self, x: AttnInput) -> Tensor:
        self.angles.note(x)
        super().absorb(x)
        self.n_local = self._window_so_far()
        if self.n_local is None:
            out: Tensor = ops.prefill_attention(x.q, self.store.k, self.store.v, self.spec.scale)
            return out
        self._note_first()
        at = self._stored_positions()[0, 0]  # all heads keep the same
        blocks, start, outs = x.q.split(_QUERIES_AT_ONCE, dim=2), x.start, []
        for q in blocks:
            outs.append(self._windowed(q, start, self.n_local, at))
            start += q.shape[2]
        return torch.cat(outs, 2)

    def keep(self, budget: int) -> Tensor:
        groups, device = self.spec.num_kv_heads, self.request.device
        return sinks_and_recent(self.request.batch, groups, self.method.n_init, budget, self.store.length, device)

    def seal(self) -> None:
        super().seal()
        self.n_local = self._window_so_far()

    def decode(self, x: AttnInput) -> Tensor:
        if self.n_local is None:
            return super().decode(x)
        self.angles.note(x)
        self.store.append(x.k, x.v)
        place = self.request.clock.now(x.start - self.n_local, x.q.device)
        first = self.angles.turn(self.first_keys, place).to(x.k.dtype)
        count = self.method.n_init
        return self.attend(x.q, Segment(first, self.store.v[:, :, :count]), self.store.since(count))

    def _window_so_far(self) -> int | None:
        budget, seen = self.request.budget, self.seen
        if budget is None or budget.covers(seen, self.spec.index) or seen <= self.method.smallest_budget:
            return None
        return max(1, budget.tokens(seen, self.spec.index) - self.method.n_init)

    def _note_first(self) -> None:
        count = min(self.method.n_init, self.store.length)
        self.first_keys = self.angles.undo(self.store.k[:, :, :count], torch.arange(count, device=self.request.device))

    def _windowed(self, q: Tensor, start: int, n_local: int, at: Tensor) -> Tensor:
        """Queries from position `start` on, stored tokens at positions `at` [S]. -> [B H t D]"""
        query_at = torch.arange(start, start + q.shape[2], device=q.device)
        low, high = (int(torch.searchsorted(at, p)) for p in (query_at[0] - n_local + 1, query_at[-1] + 1))
        k, v = self.store.k, self.store.v
        distance = query_at.unsqueeze(1) - at[low:high]
        near = self._logits(q, k[:, :, low:high], (distance >= 0) & (distance < n_local))
        far_q = self.angles.move(q, query_at, n_local)
        place = torch.zeros(1, dtype=torch.long, device=q.device)
        first = self.angles.turn(self.first_keys, place).to(k.dtype)
        count = first.shape[2]
        far = self._logits(far_q, first, query_at.unsqueeze(1) - at[:count] >= n_local)
        weights = torch.cat([far, near], -1).softmax(-1).to(v.dtype)
        values = torch.cat([v[:, :, :count], v[:, :, low:high]], 2)
        return (weights.flatten(2, 3) @ values).view_as(q)

    def _logits(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        """q [B H t D], k [B G S D], seen [t S] -> [B G g t S]"""
        folded = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1]) @ k.transpose(-1, -2)
        logits = folded.view(*k.shape[:2], self.spec.group, q.shape[2], -1).float() * self.spec.scale
        return logits.masked_fill(~seen, float("-inf"))
