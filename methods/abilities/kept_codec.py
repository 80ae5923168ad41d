"""Writes keys and values in fewer bits. If a method reads a choice of its tokens, the pool writes
those that a step reads only if they are chosen (methods/pools). If it evicts at the seal, this file
writes those that stay."""

from __future__ import annotations

from dataclasses import dataclass

from methods.base import Ability, KVLayer, LayerSpec, Method
from methods.layers.ability_state import AbilityState
from methods.layers.layer import Layer
from methods.pools import PerHeadPool, PerHeadStore
from methods.tiers.codec import Codec


@dataclass(frozen=True)
class KeptCodec(Ability):
    """Write tokens as `codec` says. Policies of a method that takes it attend by
    `Storage.attend_all`, which reads encoded tokens too. The setting `codec` adds it."""

    lacking = "has nothing that a codec is meant for"
    codec: Codec

    def error(self, method: Method, why: str) -> ValueError:
        return ValueError(f"{type(method).__name__} {why}: use it without one.")

    def check_model(self, spec: LayerSpec) -> None:
        self.codec.for_layer(spec)

    def start(self, layer: KVLayer) -> Encoding | None:
        assert isinstance(layer, Layer)
        return Encoding() if layer.reads is None else None


class Encoding(AbilityState, capturable=True, of_each={}):
    """Write the tokens in fewer bits that stayed when others left."""

    def after_keep(self) -> None:
        if self.layer.evicted:
            encode(self.layer)


def encode(layer: Layer) -> None:
    """Write all stored tokens of `layer` in fewer bits, as the request's codec says."""
    if not isinstance(layer.store, PerHeadStore):
        layer.send_away(0, layer.store.length)
        return
    heads = layer.store.per_head()
    layer.far, layer.first_far = PerHeadPool(layer.spec, layer.cache, heads), 0
    keys, values = [k[:0] for k, _ in heads], [v[:0] for _, v in heads]
    layer.store = PerHeadStore(
        layer.spec, layer.cache, keys, values, layer.request.capacity - layer.seen
    )
