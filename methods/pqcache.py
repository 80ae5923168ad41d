"""PQCache: finds each step's tokens by product quantisation of the keys (arXiv 2407.12820,
SIGMOD'25).

The rule: at the seal, the rotated keys between sinks and local window are split into m sub-vectors,
each clustered per KV head into 2^b centroids. A step scores all of them from a small table of
query-centroid products, takes the softmax over these candidates, sums over the query heads of a
group, and reads the best tokens exactly. With fewer candidates than centroids, every candidate is
its own centroid.

On a GPU, keys of two parts with up to 64 centroids each are chosen by pairs of codes: how many keys
have each pair is counted at the seal, and a step weighs the 4096 pairs in place of all keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isclose
from typing import Literal

import torch
from torch import Tensor

from kernels import ops
from kernels.reference import Segment, pq_held
from methods.abilities.kept_codec import KeptCodec
from methods.abilities.mass import Mass
from methods.base import AttnInput, Cost, CostError, LayerSpec, LayerWorkload, Takes
from methods.base.state import queues
from methods.layers import Select
from methods.layers.windowed import Windowed
from methods.parts import block_cache, costs
from methods.parts.block_cache import BlockCache
from methods.parts.kmeans_iterations import LENGTHS, Fit, measure
from methods.tiers.tier import DEVICE
from methods.tiers.transfer import Arrival


class PQRead(Select, capturable=True, of_each={"centroids": 3, "codes": 2, "held": 2}):
    """Read in each step the prompt tokens with the largest softmax weights, as product-quantised
    keys approximate them."""

    method: PQCache
    centroids: Tensor  # [B G m C d'], in the cache's dtype
    codes: Tensor  # [B G M m]
    # [B G C*C], how many tokens have each pair of codes; None where none are counted
    held: Tensor | None = None
    # both, while they are computed during later layers
    clustered: Arrival[tuple[Tensor, Tensor]] | None = None
    blocks: BlockCache | None = None

    def index(self, keys: Tensor) -> None:
        rounds = self.method.rounds(keys.shape[2], self.request.prepared)
        # a GPU clusters them in less time than a copy takes
        if not self.cache.ahead or queues(keys.device):
            self._take(*self.method.coded(keys, rounds))
            return
        copied = keys.clone()  # the keys themselves leave the store
        # as in the paper, a CPU clusters them, and the device has all its time for later layers
        self.clustered = self.cache.work(partial(self.method.coded, copied, rounds))

    def select(self, q: Tensor, top: int) -> Tensor:
        self.settle()
        index, scale = (self.centroids, self.codes), self.spec.scale
        if self.held is None:
            return ops.top_k(ops.pq_weights(q, *index, scale), top)
        return ops.pq_best(q, *index, self.held, scale, top)

    def settle(self) -> None:
        if self.clustered is not None:
            coded, self.clustered = self.clustered.wait(), None
            self._take(*(x.to(self.request.device) for x in coded))

    def _take(self, centroids: Tensor, codes: Tensor) -> None:
        self.centroids, self.codes, clusters = centroids, codes, centroids.shape[3]
        counts = self.method.counts_pairs(self.request.device, clusters, self.spec.group)
        self.held = pq_held(codes, clusters) if counts else None

    def sent_away(self, tokens: Segment) -> None:
        how, far = self.method, self.layer.far
        if how.cache_tokens and far is not None:
            self.blocks = BlockCache(
                far, tokens, size=how.cache_block, slots=how.slots, offered=how.cache_offered
            )

    def fetch(self, rows: Tensor) -> Segment:
        return super().fetch(rows) if self.blocks is None else self.blocks.read(rows)

    def together_refusal(self) -> str | None:
        return (
            super().together_refusal() if self.blocks is None else "blocks are kept of one sequence"
        )

    def count_replayed(self, steps: int) -> None:
        super().count_replayed(steps)
        if self.blocks is not None:
            self.blocks.step += steps

    def reopen(self) -> None:
        self.blocks = self.clustered = None


@dataclass(frozen=True, kw_only=True)
class PQCache(Windowed):
    """Define PQCache, which finds tokens by product quantisation of the keys, by its parameters: a
    key is split into `m` sub-vectors, each coded by one of 2^`b` centroids that k-means finds.
    `sinks` and `recent_ratio` say how many first and last tokens are always read;
    conf/method/pqcache.yaml explains the others."""

    policies = (PQRead,)
    offloads = True
    rows_stay = True
    tunable = {**Windowed.tunable, "m": (1, 2, 4, 8), "b": (4, 6, 8)}

    m: int = 2
    b: int = 6
    iterations: int | Literal["auto"] | tuple[float, ...] = 10
    tolerance: float = 0.0001
    seed: int = 4321
    sinks: int = 32
    recent_ratio: float = 0.5
    cache_tokens: int = 0
    cache_block: int = 128
    cache_offered: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.m < 1:
            raise ValueError(
                f"m={self.m} must be at least 1: it is the number of sub-vectors a key is split into."
            )
        if not 1 <= self.b <= 16:
            raise ValueError(
                f"b={self.b} must lie in 1..16: it is the bits of a code, 2^b centroids."
            )
        asked = self.iterations
        if isinstance(asked, int) and asked < 1:
            raise ValueError(f"iterations={asked} must be at least 1: k-means needs a round.")
        if isinstance(asked, tuple) and (len(asked) != len(Fit._fields) or min(asked) < 0):
            raise ValueError(
                f"iterations={asked} is no fit: give a number of rounds, auto, or the {len(Fit._fields)} numbers that "
                "a run with auto wrote into its run.json, none negative."
            )
        if self.cache_block < 1 or self.cache_offered < 1:
            raise ValueError(
                f"cache_block={self.cache_block} and cache_offered={self.cache_offered} must be at least 1."
            )
        if self.cache_tokens and self.cache_tokens < self.cache_block:
            raise ValueError(
                f"cache_tokens={self.cache_tokens} holds no block of {self.cache_block} tokens: give 0 for no cache, "
                "or at least cache_block."
            )

    @property
    def takes(self) -> Takes:  # type: ignore[override]
        whole = "cache_tokens keeps blocks that were read as a whole" if self.cache_tokens else None
        return {Mass: whole, KeptCodec: None}

    @property
    def calibration_tokens(self) -> int:
        return max(LENGTHS) if self.iterations == "auto" else 0

    def rounds(self, tokens: int, prepared: object) -> int:
        """Return the most rounds of k-means that may run for `tokens` keys. `prepared`: what
        `prepare` returned, from which `iterations=auto` computes it."""
        if isinstance(self.iterations, int):
            return self.iterations
        assert isinstance(prepared, Fit)
        return prepared.iterations(tokens)

    def prepare(
        self, specs: Sequence[LayerSpec], observe: Callable[[int], Iterator[AttnInput]]
    ) -> Fit | None:
        """Return a fit that says, for any prompt length, how many rounds of k-means take no longer
        than a layer's prefill: from times measured here (`iterations=auto`), or from coefficients
        given as `iterations`. None for a fixed number of rounds."""
        if isinstance(self.iterations, int):
            return None
        if self.iterations == "auto":
            return measure(
                len(specs), observe, lambda keys, rounds: self.coded(keys, rounds, tolerance=0.0)
            )
        return Fit(*self.iterations)

    def coded(
        self, keys: Tensor, rounds: int, tolerance: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Product-quantise keys [B G M D]: split each into m sub-vectors of d' channels and cluster
        these by k-means in at most `rounds` rounds. Return centroids [B G m C d'] in the keys'
        dtype and codes [B G M m], the number of each sub-vector's centroid, of one byte if that is
        enough. `tolerance` of k-means: by default the method's."""
        count = keys.shape[2]
        clusters = min(2**self.b, count)
        points = keys.unflatten(3, (self.m, -1)).transpose(2, 3)  # [B G m M d']
        draw = torch.Generator().manual_seed(self.seed)
        initial = torch.randperm(count, generator=draw)[:clusters].to(keys.device)
        centroids, codes = ops.kmeans(
            points, initial, rounds, self.tolerance if tolerance is None else tolerance
        )
        codes = (
            codes.transpose(2, 3).to(torch.uint8 if clusters <= 256 else torch.int32).contiguous()
        )
        return centroids.to(keys.dtype), codes

    def counts_pairs(self, device: torch.device | None, clusters: int, group: int) -> bool:
        """Return whether the keys of each pair of codes are counted at the seal, because steps on
        `device` (None: a CPU) choose by pairs: there are two parts of at most 64 `clusters`, and no
        more than 16 query heads in a `group`."""
        return (
            device is not None and queues(device) and self.m == 2 and clusters <= 64 and group <= 16
        )

    def measured(self, prepared: object) -> Mapping[str, object]:
        return {"iterations": list(prepared)} if isinstance(prepared, Fit) else {}

    def cost(self, case: LayerWorkload) -> Cost:
        if self.reads_whole(case):
            return costs.dense(case)
        plan, spec = self.split(case.budget), case.spec
        middle = case.sealed - plan.sinks - plan.local
        clusters = min(2**self.b, middle)
        codes = middle * self.m * (1 if clusters <= 256 else 4)
        pairs = (
            costs.INT32 * clusters**2 if self.counts_pairs(spec.device, clusters, spec.group) else 0
        )
        index = spec.num_kv_heads * (codes + clusters * spec.head_dim * case.element_bytes + pairs)
        chosen = costs.select(case, plan, index)
        if case.placement == DEVICE or not self.cache_tokens:
            return chosen
        return chosen + block_cache.cost(
            case, middle, plan.top, self.cache_block, self.slots, self.cache_offered
        )

    @property
    def slots(self) -> int:
        """Return for how many blocks of tokens there is room in the cache on the device, which
        keeps often chosen blocks of the tokens that lie elsewhere."""
        return self.cache_tokens // self.cache_block

    def at_communication(self, share: float, head_dim: int) -> PQCache:
        """Return this method with m sub-vectors, so that their codes of one byte each are a `share`
        of a key's 2 * head_dim bytes, as its paper (arXiv 2407.12820) compares methods. Up to a
        share of 1/128 codes have 6 bits instead of 8, as in that paper."""
        asked = 2 * share * head_dim
        m = round(asked)
        if m < 1 or head_dim % m or not isclose(m, asked, rel_tol=1e-3):
            raise CostError(
                f"comm={share} asks PQCache for {asked:.4g} sub-vectors of one byte, and a key of {head_dim} channels "
                f"can be split into a divisor of that: choose {0.5 / head_dim:.4g} times such a divisor."
            )
        return replace(self, m=m, b=6 if share <= 1 / 128 else 8)

    def check_model(self, spec: LayerSpec) -> None:
        if spec.head_dim % self.m:
            raise ValueError(
                f"m={self.m} does not divide the model's head size {spec.head_dim}: choose a divisor of it."
            )
