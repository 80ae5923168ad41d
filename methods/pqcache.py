"""PQCache: product quantisation of the keys finds each step's tokens (arXiv 2407.12820, SIGMOD'25).

At the seal, the rotated keys between sinks and local window are split into m sub-vectors, each clustered per KV head
into 2^b centroids. A step scores all of them from a small table of query-centroid products, takes the softmax over
these candidates, sums over the query heads of a group, and reads the best tokens exactly.

None of the released code's defects is reproduced: k-means sees exactly the keys that are searched, codes are one byte
up to b=8, nothing is stale between prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels import ops
from methods.base import KVLayer, LayerSpec, Method, Request
from methods.layers import Plan, SelectLayer
from methods.windows import Windows


@dataclass(frozen=True, kw_only=True)
class PQCache(Method):
    """m sub-vectors of 2^b centroids, k-means, and the split of the budget (methods/windows.py)."""

    offloads: ClassVar[bool] = True

    m: int
    b: int
    iterations: int
    tolerance: float
    seed: int
    sinks: int
    recent_ratio: float

    def __post_init__(self) -> None:
        self.windows.check()
        if self.m < 1:
            raise ValueError(f"m={self.m} must be at least 1: it is the number of sub-vectors a key is split into.")
        if not 1 <= self.b <= 16:
            raise ValueError(f"b={self.b} must lie in 1..16: it is the bits of a code, 2^b centroids.")
        if self.iterations < 1:
            raise ValueError(f"iterations={self.iterations} must be at least 1: k-means needs a round.")

    @property
    def windows(self) -> Windows:
        return Windows(self.sinks, self.recent_ratio)

    @property
    def smallest_budget(self) -> int:
        return self.windows.smallest_budget

    def start(self, specs: Sequence[LayerSpec], request: Request) -> list[KVLayer]:
        for spec in specs:
            if spec.head_dim % self.m:
                raise ValueError(
                    f"m={self.m} does not divide the model's head size {spec.head_dim}: choose a divisor of it."
                )
        return [PQLayer(spec, request, self) for spec in specs]


class PQLayer(SelectLayer):
    """With fewer candidates than centroids every candidate is its own centroid."""

    method: PQCache
    centroids: Tensor  # [B G m C d'], in the cache's dtype
    codes: Tensor  # [B G M m]

    def split(self, budget: int) -> Plan:
        return self.method.windows.split(budget)

    def index(self, keys: Tensor) -> None:
        batch, groups, count, dim = keys.shape
        parts, clusters = self.method.m, min(2**self.method.b, count)
        split = keys.float().view(batch, groups, count, parts, dim // parts).transpose(2, 3)
        points = split.reshape(batch * groups * parts, count, dim // parts)
        draw = torch.Generator().manual_seed(self.method.seed)
        initial = torch.randperm(count, generator=draw)[:clusters].to(keys.device)
        centroids, codes = ops.kmeans(points, initial, self.method.iterations, self.method.tolerance)
        self.centroids = centroids.view(batch, groups, parts, clusters, -1).to(keys.dtype)
        code_type = torch.uint8 if clusters <= 256 else torch.int32
        self.codes = codes.view(batch, groups, parts, count).transpose(2, 3).to(code_type).contiguous()

    def select(self, q: Tensor, top: int) -> Tensor:
        logits = ops.pq_scores(q, self.centroids, self.codes)  # [B G g M]
        weights = (logits.float() * self.spec.scale).softmax(-1).sum(2)
        rows: Tensor = ops.top_k(weights, top)
        return rows
