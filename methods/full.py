"""Full: every step reads every token of the cache. All other methods are compared with it.

Storage: `offload` sends the prompt to where `placement` says at the seal, and each step brings all
of it back, layer by layer: while one layer attends, the prompt of the next one is on its way
(FlexGen, arXiv 2303.06865)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from weakref import ref

from torch import Tensor

from kernels.reference import Segment
from methods.base import AttnInput, CacheState, Cost, KVLayer, LayerSpec, LayerWorkload
from methods.layers import Layer, PolicyMethod
from methods.parts import costs
from methods.tiers.transfer import Arrival


@dataclass(frozen=True, kw_only=True)
class Full(PolicyMethod):
    """Define the method that keeps every token and reads all of them in each step, with which other
    methods are compared. `offload`: the prompt lies where the request's `placement` says, such as
    host memory, and each step brings all of it to the device, layer by layer.

    On the device the store is preallocated, so a step copies only its own token."""

    uses_budget = False
    rows_stay = True

    offload: bool = False

    @property
    def offloads(self) -> bool:
        return self.offload

    def cost(self, case: LayerWorkload) -> Cost:
        return costs.dense(case) + costs.sent_away(
            case, case.sealed if self.offload else 0, case.sealed
        )

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        if not self.offload:
            return super().start(specs, cache)
        layers = [OffloadedLayer(spec, cache, self) for spec in specs]
        for layer, following in zip(layers, [*layers[1:], layers[0]], strict=True):
            layer.following = ref(following)
        return list[KVLayer](layers)


class OffloadedLayer(Layer, capturable=True):
    """Send the prompt to host memory or disk once it is complete; generated tokens stay on the
    device. While a layer attends, the prompt of the next one is on its way back, and during the
    last layer that of the first, for the next step."""

    following: ref[OffloadedLayer]
    arrival: Arrival[Segment] | None = None

    def seal(self) -> None:
        super().seal()
        if self.request.pooled:
            self.send_away(0, self.sealed)

    def decode(self, x: AttnInput) -> Tensor:
        self.send_for()
        following = self.following()
        # a captured step leaves nothing on its way: the first layer's prompt comes in the step that reads it
        if following is not None and not (
            self.cache.counters.running and following.spec.index <= self.spec.index
        ):
            following.send_for()
        return super().decode(x)

    def joined(self, layers: Sequence[Layer], dead: int | None) -> None:
        """Forget the transfers that these layers have started for single sequences, since a step
        that serves several sequences together fetches their prompts itself. `layers`: those of the
        sequences; `dead`: how many slots of the batch no sequence uses."""
        for layer in (self, *cast(Sequence[OffloadedLayer], layers)):
            layer.arrival = None

    def link(self, layers: Sequence[Layer], joint: Mapping[int, Layer]) -> None:
        following = cast(OffloadedLayer, layers[0]).following()
        self.following = ref(cast(OffloadedLayer, joint[id(following)]))

    def send_for(self) -> None:
        """Start to bring the layer's offloaded prompt to the device, unless it is there or on its
        way."""
        if self.far is not None and self.arrival is None:
            self.arrival = self.far.whole(early=True)

    def attend_all(self, q: Tensor) -> Tensor:
        if self.arrival is None:
            return super().attend_all(q)
        prompt, self.arrival = self.arrival.wait(), None
        return self.attend(q, prompt, self.store.since(0))

    def bring_back(self) -> None:
        self.arrival = None
        super().bring_back()
