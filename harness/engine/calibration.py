"""Shows a method's `prepare` each layer's attention input on calibration text, computed with full
attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.engine.cache import KVCache
from harness.engine.hf import is_routed, routed
from methods.base import AttnInput, CacheState, KVLayer, LayerSpec, Request
from methods.full import Full
from methods.layers import Layer, Policy
from methods.layers.window import start_layers


class _Watch(Policy):
    """Remember the last attention input of a layer with full attention."""

    last: AttnInput | None = None

    def observe(self, x: AttnInput) -> None:
        self.last = x


def observer(
    model: PreTrainedModel, specs: Sequence[LayerSpec], text: Tensor | None
) -> Callable[[int], Iterator[AttnInput]]:
    """Return `observe(tokens)`, which runs the first tokens of `text` [1 S] once and yields the
    attention input of each layer that a method serves (methods/layers/window.py), in order.
    `specs`: those of all layers of the model, which may be attached already."""

    @torch.inference_mode()
    def observe(tokens: int) -> Iterator[AttnInput]:
        if text is None or text.shape[1] < tokens:
            raise ValueError(
                f"This method calibrates itself on {tokens} tokens of text: pass attached(..., calibration=ids) with "
                f"token ids [1 S], S >= {tokens}."
            )
        request = Request(batch=1, capacity=tokens, dtype=model.dtype, device=model.device)
        state = CacheState(request)
        watches: list[_Watch] = []

        def start(whole: Sequence[LayerSpec], cache: CacheState) -> Sequence[KVLayer]:
            watches.extend(_Watch() for _ in whole)
            return [Layer(spec, cache, Full(), watch) for spec, watch in zip(whole, watches, strict=True)]

        layers = start_layers(specs, state, start)
        ids = text[:, :tokens].to(model.device)
        with nullcontext() if is_routed(model) else routed(model):
            model(ids, past_key_values=KVCache(layers, state), logits_to_keep=1, use_cache=True)
        for watch in watches:
            assert watch.last is not None
            yield watch.last

    return observe
