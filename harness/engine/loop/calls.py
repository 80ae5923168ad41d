"""Prepares each forward of an attached model: it gets a cache of ours if it brings none, and
padding is split off."""

from __future__ import annotations

from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from harness.engine.cache import KVCache, UnsupportedError
from harness.engine.loop.cache import LoopCache
from harness.engine.loop.padded import PaddedCache

OURS = "leave it out, and the attached method's cache is used"


class MakesCaches(Protocol):
    """Make a fresh cache for a loop."""

    def __call__(self, *, batch: int, tokens: int) -> LoopCache:
        """Return a cache for `batch` sequences whose first forward brings `tokens` tokens."""


class LoopCalls:
    """Replace None or an empty `DynamicCache`, which `generate`, `pipeline` and `model(ids)` bring,
    by a cache of ours, and split batches that are padded on the left."""

    def __init__(self, make: MakesCaches) -> None:
        self.make = make

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the call's keywords with our cache and without a mask that has been read. Raises
        `UnsupportedError` for what our caches would compute wrongly."""
        call = dict(zip(signature(model.forward).parameters, args, strict=False)) | kwargs if args else dict(kwargs)
        given, mask = call.get("past_key_values"), call.get("attention_mask")
        given_ids = call.get("input_ids")
        arriving: Tensor = call["inputs_embeds"] if given_ids is None else given_ids
        batch, tokens = arriving.shape[:2]
        padded = _is_padded(mask, batch)
        if not isinstance(given, KVCache):
            _refuse(given, call.get("use_cache"), model)
            call["past_key_values"] = given = _take_place(given, self._fresh(mask if padded else None, batch, tokens))
        if isinstance(given, PaddedCache):
            places = given.read_mask(mask, tokens, arriving.device)
            _refuse_positions(call.get("position_ids"), places, mask)
            if given_ids is not None and given.members[0].rotary is not None:
                self._recompute_rows(model, given, given_ids)
                given.note_text(given_ids)
            call["position_ids"] = places
        elif padded:
            raise UnsupportedError(
                "This cache holds rows of equal length and the mask pads some: leave past_key_values out in the first "
                "turn, or give turns of equal length."
            )
        return call | {"attention_mask": None}  # it has been read, and each look at it would wait for a GPU

    def _recompute_rows(self, model: nn.Module, given: PaddedCache, ids: Tensor) -> None:
        """Compute rows again whose text outgrows its rotation with the token that arrives. ids
        [B T]"""
        for row in given.outgrowing():
            text = given.members[row].text(ids[row : row + 1])
            fresh = self.make(batch=1, tokens=text.shape[1])
            fresh.expect_text(text)
            model(text[:, :-1], past_key_values=fresh, use_cache=True, logits_to_keep=1)
            given.replace_row(row, fresh)

    def _fresh(self, mask: Tensor | None, batch: int, tokens: int) -> LoopCache:
        """Return a fresh cache; with the `mask` of padded rows, one that splits them."""
        if mask is None:
            return self.make(batch=batch, tokens=tokens)
        return PaddedCache([self.make(batch=1, tokens=tokens) for _ in range(batch)])


def _is_padded(mask: object, batch: int) -> bool:
    if mask is None:
        return False
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise UnsupportedError("A custom attention mask was given: only padding on the left is supported, as [B S].")
    if mask.shape[0] != batch:
        raise UnsupportedError(f"The attention mask has {mask.shape[0]} rows and {batch} sequences arrive.")
    return not bool(mask.all())


def _refuse(given: object, use_cache: bool | None, model: Any) -> None:
    """Raise `UnsupportedError` unless a cache of ours may replace `given`."""
    if use_cache is False or (use_cache is None and model.config.use_cache is False):
        raise UnsupportedError("use_cache=False leaves an attached method without a cache: leave it out.")
    if given is None:
        return
    if type(given) is not DynamicCache:
        raise UnsupportedError(f"A {type(given).__name__} (cache_implementation=...) was given: {OURS}.")
    if given.offloading:
        raise UnsupportedError(f"cache_implementation='offloaded' was given: {OURS}; placement=host moves its tokens.")
    if given.get_seq_length():
        raise UnsupportedError(
            f"The DynamicCache holds {given.get_seq_length()} tokens of a model without method: {OURS}."
        )


def _refuse_positions(given: Tensor | None, places: Tensor, mask: Tensor | None) -> None:
    """Raise `UnsupportedError` unless the tokens of padded rows have the positions `places`
    [B T]."""
    if given is None:
        return
    tokens = places.shape[1]
    real = torch.ones_like(places, dtype=torch.bool) if mask is None else mask[:, -tokens:].bool().to(places.device)
    if not torch.equal(given[:, -tokens:].to(places).expand_as(places)[real], places[real]):
        raise UnsupportedError("position_ids of padded rows are not 0, 1, 2, ... after the padding: leave them out.")


def _take_place(given: DynamicCache | None, cache: LoopCache) -> LoopCache:
    """Turn the caller's own cache object into `cache`, since loops go on with the object that they
    made and passed."""
    if given is None:
        return cache
    vars(given).clear()
    given.__class__ = type(cache)  # type: ignore[assignment]
    vars(given).update(vars(cache))
    return given  # type: ignore[return-value]
