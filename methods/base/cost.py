"""Computes what a layer costs, by formula: the bytes it holds, and the bytes that a step moves and
reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from methods.base.request import LayerSpec
from methods.tiers.codec import Codec
from methods.tiers.tier import DEVICE, TIERS, tier_of


@dataclass(frozen=True, slots=True)
class LayerWorkload:
    """Describe the case for which a cost is computed: one layer and one sequence, after its prompt
    was sealed (indexed, compressed or moved, as the method does at the end of a prompt)."""

    spec: LayerSpec
    sealed: int  # prompt tokens
    budget: int  # prompt tokens that a selecting head of this layer may read
    placement: str
    element_bytes: int
    reserve: int = 0  # rows kept free for generated tokens
    codec: Codec | None = None  # encodes the tokens in a pool
    # keys lie on the device in 4 bits, too, to estimate weights (`Budget.mass`)
    estimated: bool = False
    # what a KV head may hold of prompt and answer, if the budget counts both (`Budget.rows`)
    rows: int | None = None
    # tokens of the answer after which all rows are ranked anew (`EvictEvery`); None: never
    every: int | None = None

    @property
    def room(self) -> int:
        """Return for how many generated tokens a KV head has room once the prompt is sealed."""
        if self.every is None or self.rows is None:
            return self.reserve
        return min(self.reserve, max(self.rows - self.sealed, 0) + self.every)

    @property
    def capacity(self) -> int:
        return self.sealed + self.reserve

    @property
    def row_bytes(self) -> int:
        """Return the bytes of K and V of one token in this layer, all KV heads together."""
        return self.spec.num_kv_heads * self.spec.row_channels * self.element_bytes

    @property
    def key_bytes(self) -> int:
        """Return the bytes of K of one token in this layer, all KV heads together."""
        return self.spec.num_kv_heads * self.spec.head_dim * self.element_bytes

    @property
    def query_bytes(self) -> int:
        """Return the bytes of the queries of one token in this layer, all query heads together."""
        return self.spec.num_heads * self.spec.head_dim * self.element_bytes

    @property
    def dense_bytes(self) -> int:
        """Return the bytes of K and V of all tokens for which there is room: what a layer holds
        until its prompt is complete."""
        return self.capacity * self.row_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """Hold the cost of a layer: bytes on the device, bytes that a decode step moves between host
    and device, and bytes in other tiers (host memory, disk), keyed by the tiers' names. `+` adds
    costs up.

    `read_bytes_per_step` are the bytes of the prompt's keys and values that a step attends to, and
    of the index by which it chooses them, each once, wherever they lie and as they are encoded.
    Generated tokens are read in addition."""

    device_bytes: int = 0
    moved_bytes_per_step: int = 0
    away: Mapping[str, int] = field(default_factory=dict)
    read_bytes_per_step: int = 0

    @staticmethod
    def placed(tier: str, held: int, moved: int = 0) -> Cost:
        """Return the cost of `held` bytes in the tier named `tier`. Each step moves `moved` bytes
        of them to the device, or none if they lie there."""
        return Cost(held) if tier == DEVICE else Cost(0, moved, {tier: held})

    @property
    def held(self) -> dict[str, int]:
        """Return the bytes in every tier, keyed by its name. Raises `ValueError` if bytes were
        given for a tier that does not exist."""
        for tier in self.away:
            tier_of(tier)
        return {
            tier: self.device_bytes if tier == DEVICE else self.away.get(tier, 0) for tier in TIERS
        }

    def __add__(self, other: Cost) -> Cost:
        away = {
            tier: self.away.get(tier, 0) + other.away.get(tier, 0)
            for tier in (*self.away, *other.away)
        }
        moved = self.moved_bytes_per_step + other.moved_bytes_per_step
        read = self.read_bytes_per_step + other.read_bytes_per_step
        return Cost(self.device_bytes + other.device_bytes, moved, away, read)

    def read_by(self, layers: int) -> Cost:
        """Return the cost if as many `layers` of the model read these rows in each step, each by itself."""
        moved, read = self.moved_bytes_per_step * layers, self.read_bytes_per_step * layers
        return replace(self, moved_bytes_per_step=moved, read_bytes_per_step=read)

    def reading(self, count: int) -> Cost:
        """Return a copy of this cost in which a step reads `count` bytes."""
        return replace(self, read_bytes_per_step=count)


class CostError(ValueError):
    """Say why a cost cannot be computed: there is no formula for it, or no parameter value with
    which a method moves the share of the key cache that was asked for."""
