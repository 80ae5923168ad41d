"""One prefill for all methods whose prompt outputs are Full's.

They differ only in what they keep and read; so Full attends once per prompt and every method absorbs the same keys and
values. Scores and fidelity are those of separate runs; the cost of the prefill is not paid by the method that is
scored, so these runs are stamped `simulated` and their speed cells stay empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.fidelity import reference_layers
from harness.jobs.usage import Usage
from methods.base import AttnInput, CacheState, KVLayer
from methods.tiers.tier import DEVICE

Absorb = Callable[[KVLayer, AttnInput], None]


class Prefilled(NamedTuple):
    """A prompt that a method has taken in and not sealed yet."""

    cache: KVCache
    logits: Tensor  # [B V], of its last token
    began: float
    usage: Usage


class _Front(KVCache):
    """The cache that attends; what its layers see others absorb as well."""

    def __init__(
        self, layers: Sequence[KVLayer], state: CacheState, followers: Sequence[tuple[KVCache, Absorb]]
    ) -> None:
        super().__init__(layers, state)
        self.followers = followers

    def note_length(self, tokens: int) -> int:
        for cache, _ in self.followers:
            cache.note_length(tokens)
        return super().note_length(tokens)

    def attend(self, layer: int, x: AttnInput) -> Tensor:
        out = super().attend(layer, x)
        for cache, absorb in self.followers:
            absorb(cache.layers[layer], x)
        return out


class SharedPrefill:
    """The prefill of `prompts` [B S], which fills every cache that was made for it."""

    def __init__(self, engine: Engine, prompts: Tensor, new_tokens: int) -> None:
        self.engine, self.prompts, self.new_tokens = engine, prompts, new_tokens
        request = engine.attachment.request(capacity=prompts.shape[1] + new_tokens, batch=len(prompts))
        self.state = CacheState(replace(request, budget=None, placement=DEVICE, codec=None))
        self.layers = reference_layers(engine.attachment.model_specs, self.state)
        self.followers: list[tuple[KVCache, Absorb]] = []

    def cache(self, engine: Engine, absorb: Absorb) -> KVCache:
        """A cache of `engine`'s method, to be filled by `run`. `absorb` hands a layer its input."""
        cache = engine.cache(self.prompts, self.new_tokens, self.layers)
        self.followers.append((cache, absorb))
        return cache

    def run(self, tokens: int) -> Tensor:
        """Prefill the first `tokens` of each prompt. -> logits of the last [B V]"""
        front = _Front(self.layers, self.state, self.followers)
        front.rotary = self.engine.attachment.rotary
        front.expect_text(self.prompts)
        logits = self.engine.prefill(front, self.prompts[:, :tokens])
        for cache, _ in self.followers:
            cache.num_tokens = front.num_tokens
        return logits
