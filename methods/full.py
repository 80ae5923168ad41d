"""Full: every step reads every token of the cache. All other methods are compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from methods.base import CacheState, Card, Case, Cost, Grids, KVLayer, LayerSpec, Method
from methods.layers import Layer
from methods.parts import costs


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """Keeps everything and reads it in each step. offload: the prompt lies where `placement` says, and each step brings
    all of it to the device, layer by layer.

    On the device the store is preallocated, so a step copies nothing but its own token.
    """

    uses_budget: ClassVar[bool] = False
    rows_stay: ClassVar[bool] = True
    card: ClassVar[Card | None] = Card(
        prefill="dense",
        rule="keeps and reads everything",
        unit="-",
        group_rule="-",
        dense_layers="all",
        sinks="-",
        window="-",
        on_device="K and V",
        on_host="K and V of the prompt (offload={offload})",
        index_cost="none",
        budget="not used",
        deviations="none",
    )

    tunable: ClassVar[Grids] = {}

    offload: bool = False

    @property
    def offloads(self) -> bool:
        return self.offload

    def cost(self, case: Case) -> Cost:
        return costs.dense(case) + costs.sent_away(case, case.sealed if self.offload else 0, case.sealed)

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        kind = OffloadedLayer if self.offload else Layer
        return [kind(spec, cache, self) for spec in specs]


class OffloadedLayer(Layer, capturable=True):
    """Sends the prompt away at the seal; generated tokens stay on the device."""

    def seal(self) -> None:
        super().seal()
        if self.request.pooled:
            self.send_away(0, self.sealed)
