"""Finds where numbers stop being finite, after an answer has shown that they do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.models.base import DTYPES


class NotFiniteError(ValueError):
    """Report logits that hold NaN or infinity: which part of the model gives them first, and what
    to try."""


class _NotFinite(Exception):
    def __init__(self, place: str, module: nn.Module) -> None:
        super().__init__(place)
        self.place, self.module = place, module


def not_finite(model: Any, method: str, token: int, read: Callable[[], None]) -> NotFiniteError:
    """Return the error for an answer in which the logits of `token`, counted from 0, are the first
    that are not finite.

    `read` makes the model's own modules read everything up to there again. `method`: the name of
    the attached method."""
    first_place = _first_place(model, read)
    what = f"The logits of the answer's first {token + 1} tokens are not all finite"
    if first_place is None:
        return NotFiniteError(
            f"{what}, but the model's own modules give finite ones for the same text: an operation of this run is at "
            "fault. Set backends=torch to use others."
        )
    weights = [name for name, weight in first_place.module.named_parameters() if not bool(weight.isfinite().all())]
    dtype = next((short for short, name in DTYPES.items() if model.dtype == getattr(torch, name)), str(model.dtype))
    where = f"{what}: {first_place.place} is the first part of the model whose output is not finite, in {dtype}"
    if weights:
        return NotFiniteError(
            f"{where}, and its {weights[0]} holds values that are not finite: fetch or convert the model again."
        )
    wider = {"fp16": "dtype=bf16 or dtype=fp32", "bf16": "dtype=fp32"}.get(dtype)
    where += ", though its weights are finite"
    if method == "Full":  # which leaves nothing out, so that the model gives such numbers by itself
        return NotFiniteError(f"{where}. Try {wider}." if wider else f"{where}: check the model's config.json.")
    advice = f"Try {wider}, and run" if wider else "Run"
    return NotFiniteError(f"{where}. {advice} method=full to see whether {method} is at fault.")


def _first_place(model: Any, read: Callable[[], None]) -> _NotFinite | None:
    """Return the first module, in the order in which they run, whose output holds NaN or
    infinity."""
    with ExitStack() as hooks:
        for place, module in _places(model):
            hooks.callback(module.register_forward_hook(partial(_look, place)).remove)
        try:
            read()
        except _NotFinite as first_place:
            return first_place
    return None


def _places(model: Any) -> list[tuple[str, nn.Module]]:
    decoder = model.get_decoder()
    layers = [(f"layer {number}", layer) for number, layer in enumerate(decoder.layers)]
    ends = [("the last norm", decoder.norm), ("the output layer", model.get_output_embeddings())]
    return [("the embedding", decoder.embed_tokens), *layers, *ends]


def _look(place: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    states: Tensor = output[0] if isinstance(output, tuple) else output
    if not bool(states.isfinite().all()):
        raise _NotFinite(place, module)
