"""ShadowKV: keeps keys as low-rank factors and values on the host, and chooses chunks by their mean
key (arXiv 2410.21465).

The rule: at the seal, the keys of all KV heads of a layer, before their rotation, are factorised as
one matrix of rank r. Each chunk of c rotated keys is represented by its mean, the landmark. In each
KV head, the chunks with the lowest cosine between landmark and any of their keys are outliers. They
stay exact on the device, and so do the last chunks. A step takes the softmax over the other
landmarks, and then the maximum over a group's query heads. It fetches the values of the best
chunks, rebuilds their keys, and rotates these at their true positions.

The paper's budget counts only retrieved tokens (`budget_rule=paper`); ours includes local chunks
and outliers. At budget=2464 the defaults give the paper's 2048 retrieved tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kernels import ops
from kernels.lowrank import SOLVERS, low_rank
from kernels.ragged import Ragged, filled, leading
from kernels.reference import Segment
from methods.base import (
    Attended,
    AttnInput,
    Cost,
    LayerSpec,
    LayerWorkload,
)
from methods.base.pieces import pieces, tokens_at_once
from methods.base.state import queues
from methods.layers import Padded, Read, RotatingMethod
from methods.parts import costs
from methods.parts.hit_cache import HitCache, held_bytes
from methods.parts.rope_table import RopeTable
from methods.pools import KVStore, rows_for
from methods.pools.batched import BatchedHostRows
from methods.tiers.block import FAR
from methods.tiers.rows import Rows
from methods.tiers.traffic import Traffic


class ChunkPlan(NamedTuple):
    """Say how a budget is spent. The prompt's last `local` tokens are always read. Of the
    `candidates`, the chunks of tokens before them, `outliers` are always read and `top` are
    selected in each step."""

    candidates: int
    local: int
    outliers: int
    top: int


OF_EACH = {
    "u": 1, "basis": 2, "values": 2, "landmarks": 2, "chunks": 2, "rope_table": None, "total": None,
    "held": Padded(2), "held_k": Padded(2), "held_v": Padded(2),
}  # fmt: skip


class ShadowRead(HitCache, Read[ChunkPlan], capturable=True, of_each=OF_EACH):
    """Read in each step the chunks of tokens whose mean keys suit the query best: their keys are
    rebuilt from low-rank factors, and their values fetched. `store` holds what is always read:
    outliers (chunks that their mean represents badly), the last chunks and generated tokens, in
    this order."""

    method: ShadowKV
    u: Tensor  # [B N*c r], one row per candidate token, shared by the KV heads
    basis: Tensor  # [B G r D]
    values: Rows | BatchedHostRows | Tensor  # [B G N c*D]
    landmarks: Tensor  # [B G N-o D]
    chunks: Tensor  # [B G N-o 1], which chunk a landmark stands for
    outliers: Tensor  # [B G o]

    def __init__(self, rope_table: RopeTable) -> None:
        self.rope_table = rope_table

    def split(self, budget: int) -> ChunkPlan:
        return self.method.plan(budget, self.sealed)

    def prepare(self, plan: ChunkPlan) -> None:
        """Compress the complete prompt: factorise its keys, send its values away, compute the mean
        keys (landmarks) by which chunks are found, and keep outliers and the last tokens
        exactly."""
        whole, count, size = self.store, plan.candidates, self.method.chunk
        self.size, self.total = size, count
        self._factorise(whole.k, count)
        # [B G N c D]
        keys, values = (
            x[:, :, : count * size].unflatten(2, (count, size)) for x in (whole.k, whole.v)
        )
        self.values = rows_for(values.flatten(3), self.cache, self.spec.index)
        self._index(keys, plan.outliers)
        k, v = (
            ops.gather_rows(x.flatten(3), self.outliers).unflatten(3, (size, -1)).flatten(2, 3)
            for x in (keys, values)
        )
        local = whole.between(self.sealed - plan.local, self.sealed)[:2]
        room = self.request.capacity - self.layer.seen
        self.layer.store = KVStore.holding(self.spec, self.cache, room, (k, v), local)

    def _factorise(self, keys: Tensor, count: int) -> None:
        """Factorise all keys [B G S D] of the prompt before their rotation, those of all KV heads
        as one matrix, into u and basis. Keep only the rows of u of the first `count` chunks, which
        may be selected."""
        batch, groups, tokens, dim = keys.shape
        joint = torch.empty(batch, tokens, groups * dim, device=keys.device)
        by_head = joint.unflatten(2, (groups, dim)).transpose(1, 2)
        for part in pieces(tokens, at_once=tokens_at_once(keys.device)):
            positions = torch.arange(part.start, part.stop, device=keys.device)
            by_head[:, :, part] = self.rope_table.unrotate(keys[:, :, part], positions)
        u, basis = low_rank(joint, self.method.rank_of(tokens, groups * dim), self.method.solver)
        self.u = u[:, : count * self.method.chunk].to(keys.dtype).contiguous()
        self.basis = basis.unflatten(2, (groups, -1)).transpose(1, 2).to(keys.dtype).contiguous()

    def _index(self, keys: Tensor, outliers: int) -> None:
        """Compute the landmarks, the mean keys by which chunks are found, and pick as outliers the
        `outliers` chunks that their mean represents worst; these get no landmark. keys [B G N c D]:
        N chunks of c tokens"""
        at_once = keys.split(max(1, tokens_at_once(keys.device) // self.method.chunk), 2)
        means, lowest = (
            torch.cat(parts, 2) for parts in zip(*map(landmarks, at_once), strict=True)
        )
        self.outliers = ops.top_k(-lowest, outliers)
        count = lowest.shape[2]
        others = torch.ones_like(lowest, dtype=torch.int64).scatter(2, self.outliers, 0)
        # the last one is for all outliers
        places = torch.where(others > 0, others.cumsum(2) - 1, count - outliers)
        numbers = torch.arange(count, device=lowest.device).expand(lowest.shape)
        chunks = numbers.new_empty(*lowest.shape[:2], count - outliers + 1).scatter_(
            2, places, numbers
        )[..., :-1]
        chunks = chunks.contiguous()
        self.landmarks = ops.gather_rows(means, chunks).to(self.request.dtype)
        self.chunks = chunks.unsqueeze(-1)

    def select(self, q: Tensor, top: int) -> Tensor:
        """Return the numbers of the `top` chunks to read, by the products of the query with the
        landmarks. q [B H 1 D] -> [B G top]"""
        grouped = q.view(*self.landmarks.shape[:2], self.spec.group, -1)
        weights = ops.row_weights(grouped, self.landmarks, self.spec.scale, "largest")
        return leading(
            filled(ops.gather_rows(self.chunks, ops.top_k(weights, top))).squeeze(-1), top
        )

    def read(self, x: AttnInput, plan: ChunkPlan) -> Tensor:
        rows = self.chosen(x.q, plan.top)
        self.settle()
        if self.method.hit_cache:
            may_wait = not (self.cache.counters.running or queues(self.request.device))
            load_new = self._rebuild_new if may_wait else None
            chosen = self.read_through(rows, self._rebuild, load_new, self.cache.traffic)
        else:
            chosen = self._rebuild(rows)
        return self.attend(x.q, self.store.since(0), chosen)

    def _rebuild(self, chunks: Tensor | Ragged, slots: Tensor | None = None) -> Segment:
        """Return keys and values of the tokens of chunks [B G K]: keys rebuilt from their factors,
        while the values are fetched. `slots` [B G K] names the places in the cache of earlier
        chunks on the device where values are; -1: not there."""
        held, size = self.values, self.method.chunk
        coming: Callable[[], Tensor]
        if isinstance(held, Rows | BatchedHostRows):
            near = None if slots is None else self.held_v

            def read(traffic: Traffic) -> Tensor:
                return held.gather(cast(Tensor, chunks), traffic, slots, near)

            coming = self.cache.fetch(read, early=True).wait
        else:  # values of several sequences on the device, which are copied at once
            coming = partial(filled, ops.gather_rows(held, chunks))
        keys = ops.rebuild_keys(
            self.u, self.basis, chunks, size, self.rope_table.cos, self.rope_table.sin
        )
        live = (chunks.sizes * size).on(chunks.device) if isinstance(chunks, Ragged) else None
        values = coming().view(*keys.shape[:2], -1, self.spec.value_channels)[:, :, : keys.shape[2]]
        return Segment(filled(keys), values, live=live)

    def _rebuild_new(self, chunks: Tensor) -> None:
        """Write keys and values of the tokens of chunks [B G K] into their places in the cache, none
        where a chunk is -1."""
        read = partial(cast(Rows, self.values).gather_into, self.held_v, chunks)
        coming, table = self.cache.fetch(read, early=True), self.rope_table
        ops.rebuild_keys(
            self.u, self.basis, chunks, self.method.chunk, table.cos, table.sin, self.held_k
        )
        coming.wait()

    def observe(self, x: AttnInput) -> None:
        self.rope_table.note(x)

    def decode(self, x: AttnInput) -> Tensor:
        self.rope_table.note(x)
        return super().decode(x)

    def rows_of(self, rows: Tensor, plan: ChunkPlan) -> Tensor:
        local = torch.arange(self.sealed - plan.local, self.sealed, device=rows.device)
        chunk_rows = ops.token_rows(torch.cat([self.outliers, rows], 2), self.method.chunk)
        return torch.cat([chunk_rows, local.expand(*chunk_rows.shape[:2], -1)], 2)

    def attended_under(self, plan: ChunkPlan) -> Attended:
        exact = plan.outliers * self.method.chunk + plan.local
        return Attended(exact + plan.top * self.method.chunk, self.store.length - exact)

    def settle(self) -> None:
        """Allocate the cache of chunks on the device before the first step reads, and not earlier:
        the memory that compressing the prompt took is then free again."""
        if self.method.hit_cache and self.plan is not None and "held" not in vars(self):
            self.begin(self.plan.top, self.store.k, self.store.v)

    def state(self) -> dict[str, Tensor]:
        """Return what a further turn needs besides the store: the compressed chunks, that is their
        factors, their values, and which are outliers. It is empty if everything is read."""
        if self.plan is None:
            return {}
        values = cast(Rows, self.values).held(self.plan.candidates)
        own = {
            "plan": torch.tensor(self.plan),
            "u": self.u,
            "basis": self.basis,
            "outliers": self.outliers,
        }
        return {f"{FAR}.values": values} | own

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.rope_table.note_past(self.spec, self.layer.seen)
        if "plan" not in state:
            return
        self.plan = plan = ChunkPlan(*state["plan"].tolist())
        self.u, self.basis, self.outliers = (state[name] for name in ("u", "basis", "outliers"))
        self.values = rows_for(state[f"{FAR}.values"], self.cache, self.spec.index, away=True)
        rebuilt = (plan.candidates - plan.outliers) * self.method.chunk
        self.layer.sealed += rebuilt
        self.layer.evicted -= rebuilt

    def form(self) -> int | None:
        """Return the rank of the keys' factors, which a short prompt limits: sequences must share
        it to take steps together. None if everything is read."""
        return None if self.plan is None else self.basis.shape[2]

    def reopen(self) -> None:
        """Put the whole prompt back into the store before a further turn, which attends to
        everything: keys rebuilt from their factors, except those of outliers, which are exact."""
        if self.plan is None:
            return
        resident, spec = self.store, self.spec
        every = torch.arange(self.plan.candidates, device=self.outliers.device).expand(
            *self.outliers.shape[:2], -1
        )
        keys, values = self._rebuild(every)[:2]
        exact = self.plan.outliers * self.method.chunk
        at = (
            ops.token_rows(self.outliers, self.method.chunk)
            .unsqueeze(-1)
            .expand(-1, -1, -1, keys.shape[3])
        )
        keys = keys.scatter(2, at, resident.k[:, :, :exact])
        rest = resident.between(exact, resident.length)[:2]
        room = self.request.capacity - keys.shape[2] - rest[0].shape[2]
        self.layer.store = KVStore.holding(spec, self.cache, room, (keys, values), rest)
        self.plan = None
        for name in ("u", "basis", "values", "landmarks", "held", "held_k", "held_v"):
            # a restored cache has no landmarks, and no step may have read a chunk
            vars(self).pop(name, None)


def landmarks(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean key of each chunk of c keys, and the lowest cosine between that mean and one
    of the chunk's keys. [B G N c D] -> [B G N D], [B G N] (fp32)"""
    means = keys.float().mean(3)
    return means, cosine_similarity(keys.float(), means.unsqueeze(3), dim=-1).amin(3)


@dataclass(frozen=True, kw_only=True)
class ShadowKV(RotatingMethod):
    """Define ShadowKV, which keeps keys as low-rank factors and values on the host, by its
    parameters. `chunk`: tokens of a chunk. `rank` of the factors: a whole number, or a share of a
    layer's key channels. `local_chunks`: how many last chunks are always read. `outlier_share`: the
    share of the other chunks read that are outliers. `hit_cache`: whether chunks chosen again stay
    on the device."""

    offloads = True
    no_latents = "the latent is the low-rank key already, and its value is no tensor of its own"
    policies = (ShadowRead,)
    tunable = {
        "chunk": (2, 4, 8, 16),
        "rank": (0.078125, 0.15625, 0.3125, 0.625, 1.0),
        "local_chunks": (1, 2, 4, 8),
        "outlier_share": (0.0, 0.05, 0.158, 0.3),
    }

    chunk: int = 8
    rank: int | float = 0.15625
    local_chunks: int = 4
    outlier_share: float = 0.158
    solver: Literal["gram_fp64", "gram_fp32", "thin_svd"] = "gram_fp64"
    hit_cache: bool = True

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(
                f"chunk={self.chunk} must be at least 1: it is the number of tokens per chunk."
            )
        if self.rank <= 0 or (isinstance(self.rank, float) and self.rank > 1):
            raise ValueError(
                f"rank={self.rank} is neither a share (a float above 0 and up to 1) nor a whole number."
            )
        if self.local_chunks < 0:
            raise ValueError(
                f"local_chunks={self.local_chunks} is negative: give 0 or more last chunks to keep."
            )
        if not 0 <= self.outlier_share < 1:
            raise ValueError(
                f"outlier_share={self.outlier_share} leaves no chunk to select: give a share from 0 to below 1."
            )
        if self.solver not in SOLVERS:
            raise ValueError(
                f"solver={self.solver!r} is unknown: choose one of {', '.join(SOLVERS)}."
            )

    @property
    def smallest_budget(self) -> int:
        """Return the smallest possible budget in tokens: the local chunks, the longest incomplete
        chunk, and one chunk to select."""
        return (self.local_chunks + 2) * self.chunk - 1

    def plan(self, budget: int, sealed: int) -> ChunkPlan:
        candidates = sealed // self.chunk - self.local_chunks
        local = sealed - candidates * self.chunk
        spare = (budget - local) // self.chunk
        outliers = int(spare * self.outlier_share)
        return ChunkPlan(candidates, local, outliers, spare - outliers)

    def paper_tokens(self, budget: Callable[[int], int], sealed: int) -> int:
        """Return the tokens read when the budget is counted as in ShadowKV's paper, where it is
        that of the retrieved chunks of tokens: outliers and local tokens come on top. `budget(n)`:
        the budget in tokens for a prompt of n; `sealed`: the prompt's length."""
        whole = self.plan(sealed, sealed)
        wanted = max(1, budget(sealed) // self.chunk)
        spent = range(whole.candidates + 1)  # chunks, outliers and retrieved together
        most = (
            bisect_right(
                spent, wanted, key=lambda chunks: chunks - int(chunks * self.outlier_share)
            )
            - 1
        )
        return whole.local + most * self.chunk

    def rank_of(self, tokens: int, channels: int) -> int:
        rank = self.rank if isinstance(self.rank, int) else max(1, round(self.rank * channels))
        return min(rank, tokens, channels)

    def cost(self, case: LayerWorkload) -> Cost:
        """Return the bytes that a layer's cache takes, moves and reads if no chosen chunk is on the
        device already, so that a step fetches all it chooses."""
        if self.reads_whole(case):
            return costs.dense(case) + costs.rope_table(case)
        plan, spec, size = self.plan(case.budget, case.sealed), case.spec, case.element_bytes
        # bytes of a chunk's, and tokens
        values, top = (case.row_bytes - case.key_bytes) * self.chunk, plan.top * self.chunk
        rank = self.rank_of(case.sealed, spec.num_kv_heads * spec.head_dim)
        factors = rank * (plan.candidates * self.chunk + spec.num_kv_heads * spec.head_dim) * size
        selectable, ids = plan.candidates - plan.outliers, costs.INT64 * spec.num_kv_heads
        landmarks = selectable * spec.num_kv_heads * spec.head_dim * size
        resident = (case.capacity - selectable * self.chunk) * case.row_bytes
        hits = held_bytes(case, plan.top, self.chunk) if self.hit_cache else 0
        read = (
            landmarks
            + resident
            + (top - case.reserve) * case.row_bytes
            + costs.rebuilding(case, rank, top)
        )
        device = Cost(
            resident + factors + landmarks + plan.candidates * (ids + values) + hits
        ) + costs.rope_table(case)
        return device.reading(read) + costs.offload(
            case, plan.candidates * values, plan.top * values
        )

    def check_model(self, spec: LayerSpec) -> None:
        channels = spec.num_kv_heads * spec.head_dim
        if self.rank > channels:
            raise ValueError(
                f"rank={self.rank} is more than the {channels} channels of this model's keys: choose at most that, or "
                "a share of them like 0.15625."
            )
