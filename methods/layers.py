"""Ready-made layers, so that most methods are one function: DenseLayer, SelectLayer (`select`), EvictLayer (`keep`)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from kernels import ops
from kernels.reference import Segment
from methods.base import Attended, AttnInput, CacheState, KVLayer, LayerSpec, Method, Plan
from methods.parts.stores import HostStore, KVStore


class DenseLayer(KVLayer, capturable=True):
    """Keeps everything and reads everything."""

    def __init__(self, spec: LayerSpec, cache: CacheState, method: Method) -> None:
        super().__init__(spec, cache)
        self.method = method
        self.store = KVStore(spec, cache, cache.request.capacity)
        self.sealed = 0  # stored tokens that belong to the sealed prompt

    @property
    def seen(self) -> int:
        """Tokens taken in so far."""
        return self.store.length

    def limit(self) -> int | None:
        """Prompt tokens that a step may read after this seal; None for all of them."""
        budget, seen, layer = self.request.budget, self.seen, self.spec.index
        if budget is None or budget.covers(seen, layer):
            return None
        if seen <= self.method.smallest_budget:
            self.fallback = f"all is read: the prompt of {seen} tokens is no longer than the method's sinks and windows"
            return None
        self.method.check(budget, seen, layer)
        return budget.tokens(seen, layer)

    def absorb(self, x: AttnInput) -> None:
        self.store.append(x.k, x.v)

    def prefill(self, x: AttnInput) -> Tensor:
        self.absorb(x)
        out: Tensor = ops.prefill_attention(x.q, self.store.k, self.store.v, self.spec.scale)
        return out

    def seal(self) -> None:
        self.sealed = self.store.length

    def decode(self, x: AttnInput) -> Tensor:
        self.store.append(x.k, x.v)
        return self.attend(x.q, self.store.since(0))

    def attend(self, q: Tensor, *segments: Segment) -> Tensor:
        out: Tensor = ops.segment_attention(q, segments, self.spec.scale)
        return out

    @property
    def attended(self) -> Attended:
        return Attended(self.sealed, self.store.length - self.sealed)

    def read_positions(self) -> Tensor | None:
        return None

    def capture_refusal(self) -> str | None:
        if self.request.placement == "host":
            return "placement=host gathers the chosen rows on the host"
        if self.request.stale_by:
            return f"stale_by={self.request.stale_by} lets one step choose and others not"
        return super().capture_refusal()

    def count_replayed(self, steps: int) -> None:
        self.store.length += steps

    def weights(self, q: Tensor, segment: Segment, lse: Tensor) -> Tensor:
        """What one token gives each of a segment's, of the softmax that `lse` [B H] belongs to; 0 to one that is not
        there. q [B H 1 D] -> [B H S] (fp32)"""
        logits = ops.row_scores(q.view(*segment.k.shape[:2], -1, q.shape[3]), segment.k).flatten(1, 2)
        return segment.without_missing((logits * self.spec.scale - lse.unsqueeze(-1)).exp(), 0)


class SelectLayer(DenseLayer, capturable=True):
    """Keeps everything; a step reads sinks, a prompt-local window, `select`ed tokens between them, and what came since.

    With placement=host the tokens between sinks and window lie on the host and only the selected ones are moved.
    """

    middle: HostStore | None = None
    plan: Plan | None = None  # None: everything is read
    rows: Tensor | None = None  # the last selection [B G top]
    age = 0  # steps it has served

    @abstractmethod
    def split(self, budget: int) -> Plan:
        """Spend `budget` prompt tokens."""

    @abstractmethod
    def index(self, keys: Tensor) -> None:
        """Prepare for selection among the middle keys [B G M D]."""

    @abstractmethod
    def select(self, q: Tensor, top: int) -> Tensor:
        """The `top` middle tokens to read. q [B H 1 D] -> [B G top], indices into the middle."""

    def absorb(self, x: AttnInput) -> None:
        if self.middle is not None:
            self._bring_back()
        super().absorb(x)

    def seal(self) -> None:
        super().seal()
        limit = self.limit()
        self.plan = None if limit is None else self.split(limit)
        self.rows = None
        if self.plan is not None:
            self.index(self._middle_view().k)
            if self.request.placement == "host":
                self._offload()

    def decode(self, x: AttnInput) -> Tensor:
        if self.plan is None:
            return super().decode(x)
        self.store.append(x.k, x.v)
        if self.rows is None or self.age >= self.request.stale_by:
            self.rows, self.age = self.select(x.q, self.plan.top), 0
        else:
            self.age += 1
        if self.middle is not None:
            return self.attend(x.q, self.fetch(self.middle, self.rows), *self.always_read())
        sinks, *rest = self.always_read()
        return self.attend(x.q, sinks, self._middle_view()._replace(rows=self.rows), *rest)

    def fetch(self, middle: HostStore, rows: Tensor) -> Segment:
        """The chosen tokens of the host's `middle`. rows [B G top]"""
        return Segment(*middle.fetch(rows))

    def always_read(self) -> list[Segment]:
        """What every step reads: the sinks, the prompt-local window and all that came after the seal."""
        assert self.plan is not None
        if self.middle is not None:
            return [self.store.since(0)]
        k, v, sinks = self.store.k, self.store.v, self.plan.sinks
        return [Segment(k[:, :, :sinks], v[:, :, :sinks]), self.store.since(self.sealed - self.plan.local)]

    @property
    def attended(self) -> Attended:
        if self.plan is None:
            return super().attended
        away = self.middle.length if self.middle is not None else 0
        return Attended(sum(self.plan), self.store.length + away - self.sealed)

    def read_positions(self) -> Tensor | None:
        if self.plan is None or self.rows is None:
            return None
        ends = [torch.arange(self.plan.sinks), torch.arange(self.sealed - self.plan.local, self.sealed)]
        fixed = torch.cat(ends).to(self.rows.device).expand(*self.rows.shape[:2], -1)
        return torch.cat([fixed, self.rows + self.plan.sinks], -1)

    def _middle_view(self) -> Segment:
        assert self.plan is not None
        middle = slice(self.plan.sinks, self.sealed - self.plan.local)
        return Segment(self.store.k[:, :, middle], self.store.v[:, :, middle])

    def _offload(self) -> None:
        assert self.plan is not None
        whole, middle = self.store, self._middle_view()
        self.middle = HostStore(self.spec, self.cache, middle.k.shape[2])
        self.middle.append(middle.k, middle.v)
        self.store = KVStore(self.spec, self.cache, self.request.capacity - self.middle.length)
        for part in (slice(0, self.plan.sinks), slice(self.sealed - self.plan.local, self.sealed)):
            self.store.append(whole.k[:, :, part], whole.v[:, :, part])

    def _bring_back(self) -> None:
        """A further turn attends to everything: the middle returns to its place on the device."""
        assert self.plan is not None
        assert self.middle is not None
        resident, self.store = self.store, KVStore(self.spec, self.cache, self.request.capacity)
        sinks = self.plan.sinks
        self.store.append(resident.k[:, :, :sinks], resident.v[:, :, :sinks])
        self.store.append(*self.middle.fetch_all())
        self.store.append(resident.k[:, :, sinks:], resident.v[:, :, sinks:])
        self.middle = None


class EvictLayer(DenseLayer, capturable=True):
    """After the seal only `keep` of the prompt is left, in a store of its own size; what comes later is kept whole."""

    evicted = 0  # tokens that have left
    positions: Tensor | None = None  # [B G sealed], where the kept prompt tokens stood; None before the first eviction

    @property
    def seen(self) -> int:
        return self.evicted + self.store.length

    @property
    def heads(self) -> int:
        """Rows of K and V per token: the KV heads, or the query heads once they keep different tokens."""
        return self.store.k_rows.shape[1]

    @abstractmethod
    def keep(self, budget: int) -> Tensor:
        """The `budget` stored tokens each KV head keeps [B G budget], ascending.

        [B H budget] where each query head keeps its own: the store then holds a copy for each.
        """

    def seal(self) -> None:
        positions = self._stored_positions()
        super().seal()
        limit = self.limit()
        if limit is None or limit >= self.store.length:
            self.positions = positions if self.evicted else None
            return
        rows = self.keep(limit)
        whole, left, heads = self.store, self.request.capacity - self.seen, rows.shape[1]
        self.positions = positions.repeat_interleave(heads // self.heads, 1).gather(2, rows)
        self.evicted += whole.length - rows.shape[2]
        self.store = KVStore(replace(self.spec, num_kv_heads=heads), self.cache, rows.shape[2] + left)
        self.store.append(gather_per_head(whole.k, rows), gather_per_head(whole.v, rows))
        self.sealed = rows.shape[2]

    def absorb(self, x: AttnInput) -> None:
        super().absorb(self._copied(x))

    def decode(self, x: AttnInput) -> Tensor:
        return super().decode(self._copied(x))

    def read_positions(self) -> Tensor | None:
        if self.positions is None or self.heads == self.spec.num_kv_heads:
            return self.positions
        return union_per_kv_head(self.positions, self.spec.num_kv_heads, self.evicted + self.sealed)

    def _copied(self, x: AttnInput) -> AttnInput:
        """New tokens as the store holds them: repeated where query heads have copies of their own."""
        copies = self.heads // self.spec.num_kv_heads
        if copies == 1:
            return x
        return replace(x, k=x.k.repeat_interleave(copies, 1), v=x.v.repeat_interleave(copies, 1))

    def _stored_positions(self) -> Tensor:
        """Where every stored token stood in the sequence. -> [B heads S]"""
        known = self.sealed if self.positions is not None else 0
        later = torch.arange(self.evicted + known, self.seen, device=self.request.device)
        later = later.expand(self.request.batch, self.heads, -1)
        return later if self.positions is None else torch.cat([self.positions, later], -1)


def sinks_and_recent(batch: int, groups: int, sinks: int, budget: int, stored: int, device: torch.device) -> Tensor:
    """The first `sinks` and the last `budget - sinks` of `stored` tokens. -> [B G budget]"""
    rows = torch.cat([torch.arange(sinks, device=device), torch.arange(stored - budget + sinks, stored, device=device)])
    return rows.expand(batch, groups, -1)


def between_ends(middle: Tensor, plan: Plan, stored: int) -> Tensor:
    """`plan` carried out: the first tokens, `middle` [B G top] (counted from behind the sinks), the last ones.
    -> [B G budget], ascending"""
    sinks = torch.arange(plan.sinks, device=middle.device).expand(*middle.shape[:2], -1)
    local = torch.arange(stored - plan.local, stored, device=middle.device).expand(*middle.shape[:2], -1)
    return torch.cat([sinks, middle.sort(-1).values + plan.sinks, local], -1)


def gather_per_head(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of each KV head or of each query head. x [B G S D], rows [B G|H K] -> [B G|H K D]"""
    batch, groups = x.shape[:2]
    found: Tensor = ops.gather_rows(x, rows.reshape(batch, groups, -1))
    return found.view(*rows.shape, -1)


def union_per_kv_head(rows: Tensor, groups: int, stored: int) -> Tensor:
    """What a KV head's query heads read together. rows [B H K], of `stored` -> [B G K'], ascending, filled up with -1
    where another KV head's union is larger. Rows from `stored` on are left out."""
    together = rows.reshape(rows.shape[0], groups, -1)
    room = max(stored, int(together.max()) + 1)
    read = torch.zeros(*together.shape[:2], room, dtype=torch.bool, device=rows.device)
    read = read.scatter_(2, together, True)[..., :stored]
    places = torch.where(read, torch.arange(stored, device=rows.device), stored).sort(-1).values
    places = places[..., : int(read.sum(-1).max())]
    return places.masked_fill(places == stored, -1)
