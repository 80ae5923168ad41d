"""Divides a model's layers: those with a sliding window stay with the model, the others belong to
the method.

A method gets the layers that see the whole text, numbered among themselves, as if the model had no
others: budgets per layer, dense layers, a pyramid and a guess for the next layer count only these.
A model that slides in every layer (Mistral 7B v0.1, Phi-3 mini 4k) is a dense one for a method as
long as the text fits into its window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from methods.base import CacheState, KVLayer, LayerSpec, Method
from methods.layers.window import WindowLayer

Start = Callable[[Sequence[LayerSpec], CacheState], Sequence[KVLayer]]


def whole_layers(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the specs of the layers that a method gets."""
    seeing = [spec for spec in specs if spec.window is None] or [replace(spec, window=None) for spec in specs]
    return [replace(spec, index=index, num_layers=len(seeing)) for index, spec in enumerate(seeing)]


def check_length(method: Method, specs: Sequence[LayerSpec], tokens: int) -> None:
    """Raise `ValueError` if no layer sees the whole of `tokens` tokens and the method would choose
    among them."""
    if method.uses_budget and _all_slide(specs, tokens):
        raise ValueError(
            f"Every layer of this model slides over {specs[0].window} tokens and this text takes {tokens}, so "
            f"{type(method).__name__} would have no layer: shorten the text, or use method=full."
        )


def check_growth(specs: Sequence[LayerSpec], before: int, after: int) -> None:
    """Raise `ValueError` if a model that slides in every layer outgrows its window: `start_layers`
    makes other layers then."""
    if _all_slide(specs, after) and not _all_slide(specs, before):
        raise ValueError(
            f"Every layer of this model slides over {specs[0].window} tokens, and its cache was made for {before}: say "
            f"the room beforehand, as attached(..., capacity={after})."
        )


def _all_slide(specs: Sequence[LayerSpec], tokens: int) -> bool:
    return all(spec.window is not None and spec.window < tokens for spec in specs)


def start_layers(specs: Sequence[LayerSpec], cache: CacheState, start: Start) -> list[KVLayer]:
    """Return a layer for each of the model's: layers with a sliding window keep it, and `start`
    makes the others."""
    if _all_slide(specs, cache.request.capacity):
        return [WindowLayer(spec, cache) for spec in specs]
    hybrid = any(spec.window is None for spec in specs)
    method_layers = iter(start(whole_layers(specs), cache))
    return [WindowLayer(spec, cache) if hybrid and spec.window is not None else next(method_layers) for spec in specs]
