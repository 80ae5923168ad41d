"""Holds keys and values in fewer bits where KV heads keep different numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from methods.base import CacheState, LayerSpec
from methods.pools.pool import Pool
from methods.tiers.codec import Part


class PerHeadPool(Pool):
    """Hold the tokens of every KV head of every sequence in a pool of its own, on the device, as
    `PerHeadStore` does with plain rows. `length` and `encoded` are means over the heads."""

    def __init__(
        self, spec: LayerSpec, cache: CacheState, heads: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Encode `heads`: keys and values [S D] of every head, one sequence after the other. Their
        tokens together are a multiple of the number of heads."""
        alone = CacheState(
            replace(cache.request, batch=1), counters=cache.counters, engine=cache.engine
        )
        self.pools = [Pool(replace(spec, num_kv_heads=1), alone, len(k)) for k, _ in heads]
        for pool, (k, v) in zip(self.pools, heads, strict=True):
            pool.append(k[None, None], v[None, None])
        self.spec, self.cache = spec, cache
        self.codec, self.layout = self.pools[0].codec, self.pools[0].layout
        self.length = sum(pool.length for pool in self.pools) // len(self.pools)

    @property
    def tier(self) -> str:
        return self.pools[0].tier

    @property
    def encoded(self) -> int:
        return sum(pool.encoded for pool in self.pools) // len(self.pools)

    def by_store(self) -> list[list[Part]]:
        return [pool.segments().wait() for pool in self.pools]

    def per_head(self) -> list[tuple[Tensor, Tensor]]:
        """Return the decoded keys and values [S D] of every head, one sequence after the other."""
        decoded = (pool.whole().wait() for pool in self.pools)
        return [(tokens.k[0, 0], tokens.v[0, 0]) for tokens in decoded]
