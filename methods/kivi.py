"""KIVI: keeps and reads every token, all but the last in few bits (arXiv 2402.02750, ICML'24).

Keys have channels that are large throughout, so each channel has a range of its own for every `group` tokens. Values
have no such channels, so each token has a range for every `group` channels. Tokens are quantised `residual` at a time,
prompt and generated ones alike; those that do not fill such a block wait in full precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from methods.base import AttnInput, CacheState, Card, Case, Cost, Grids, KVLayer, LayerSpec, Method
from methods.layers import Layer
from methods.parts import costs
from methods.pools import KVStore, Pool
from methods.tiers.integers import IntCodec


@dataclass(frozen=True, kw_only=True)
class Kivi(Method):
    """Holds the parameters. bits: 2, 4 or 8. group: how many numbers share a range. residual: how many tokens are
    quantised together."""

    uses_budget: ClassVar[bool] = False
    offloads: ClassVar[bool] = True
    card: ClassVar[Card | None] = Card(
        prefill="dense",
        rule="keeps and reads everything, in {bits} bits",
        unit="-",
        group_rule="-",
        dense_layers="none",
        sinks="-",
        window="up to {residual} last tokens in full precision",
        on_device="codes of {bits} bits, two fp16 numbers for every {group} codes, the last tokens",
        on_host="all codes and the ranges of values: each step moves them back",
        index_cost="none",
        budget="not used",
        deviations=(
            "values are quantised together with their keys, a block of {residual} tokens at a time, where the released "
            "code keeps the last {residual} values and quantises one per step. A range is widened to what fp16 can "
            "hold, so that its ends are not cut off. Attention unpacks all codes in each step; the released code's "
            "CUDA kernel does so on the way, and gains speed by it"
        ),
        later_turns="reads what earlier turns left in {bits} bits, its prefill too",
    )

    tunable: ClassVar[Grids] = {"bits": (2, 4, 8), "group": (16, 32, 64), "residual": (64, 128, 256)}

    bits: int = 4
    group: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        if self.residual < 1 or self.residual % self.codec.block:
            raise ValueError(
                f"residual={self.residual} must be a multiple of group={self.group}: so many tokens are quantised at "
                "a time, a group of each channel together."
            )

    @property
    def codec(self) -> IntCodec:
        return IntCodec(bits=self.bits, group=self.group)

    def whole_blocks(self, tokens: int) -> int:
        return tokens // self.residual * self.residual

    def cost(self, case: Case) -> Cost:
        if not (quantised := self.whole_blocks(case.sealed)):
            return costs.dense(case)
        room = self.whole_blocks(case.capacity)
        return Cost(self.residual * case.row_bytes) + costs.pool(case, self.codec, room, quantised)

    def check_model(self, spec: LayerSpec) -> None:
        self.codec.check(spec.head_dim)

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        return [KiviLayer(spec, cache, self) for spec in specs]


class KiviLayer(Layer, capturable=True):
    """Holds the tokens that wait in its store."""

    method: Kivi

    def seal(self) -> None:
        super().seal()
        self._quantise()

    def decode(self, x: AttnInput) -> Tensor:
        out = super().decode(x)
        self._quantise()
        return out

    def capture_refusal(self) -> str | None:
        after = self.store.length + self.request.capacity - self.stored
        if after >= self.method.residual:
            return f"{after} tokens will wait, and {self.method.residual} are quantised in between"
        return super().capture_refusal()

    def new_pool(self, room: int) -> Pool:
        return Pool(self.spec, self.cache, self.method.whole_blocks(room), self.method.codec)

    def _quantise(self) -> None:
        waiting = self.store
        count = self.method.whole_blocks(waiting.length)
        if not count:
            return
        if self.far is None:
            self.far = self.new_pool(self.request.capacity)
        self.far.append(waiting.k[:, :, :count], waiting.v[:, :, :count])
        self.store = KVStore(self.spec, self.cache, self.method.residual)
        self.store.append(waiting.k[:, :, count:], waiting.v[:, :, count:])
