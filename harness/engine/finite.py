"""Says where numbers stop being finite, once an answer has shown that they do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.models.base import DTYPES


class NotFiniteError(ValueError):
    """A model's logits hold NaN or infinity; the message says since where, and what to do."""


class _Found(Exception):
    def __init__(self, place: str, module: nn.Module) -> None:
        super().__init__(place)
        self.place, self.module = place, module


def not_finite(model: Any, method: str, token: int, read: Callable[[], None]) -> NotFiniteError:
    """Return the error for an answer in which the logits of `token`, from 0, are the first that are not finite. `read`
    makes the model's own modules read everything up to there once more. `method`: the name of the attached method."""
    found = _first_place(model, read)
    what = f"The logits of the answer's first {token + 1} tokens are not all finite"
    if found is None:
        return NotFiniteError(
            f"{what}, and those of the model's own modules on the same text are: an operation of this run is at fault, "
            "so try others with backends=torch."
        )
    weights = [name for name, weight in found.module.named_parameters() if not bool(weight.isfinite().all())]
    dtype = next((short for short, name in DTYPES.items() if model.dtype == getattr(torch, name)), str(model.dtype))
    first = f"{what}: {found.place} is the first part of the model whose output is not, in {dtype}"
    if weights:
        return NotFiniteError(
            f"{first}, and its {weights[0]} holds values that are not finite: fetch or convert the model again."
        )
    wider = {"fp16": "dtype=bf16 or dtype=fp32", "bf16": "dtype=fp32"}.get(dtype)
    advice = f"try {wider}, and" if wider else "run"
    return NotFiniteError(
        f"{first}, though its weights are: {advice} method=full, to see whether it is the model or {method}."
    )


def _first_place(model: Any, read: Callable[[], None]) -> _Found | None:
    """Return the first module, in the order in which they run, that gives NaN or infinity."""
    with ExitStack() as hooks:
        for place, module in _places(model):
            hooks.callback(module.register_forward_hook(partial(_look, place)).remove)
        try:
            read()
        except _Found as found:
            return found
    return None


def _places(model: Any) -> list[tuple[str, nn.Module]]:
    decoder = model.get_decoder()
    layers = [(f"layer {number}", layer) for number, layer in enumerate(decoder.layers)]
    ends = [("the last norm", decoder.norm), ("the output layer", model.get_output_embeddings())]
    return [("the embedding", decoder.embed_tokens), *layers, *ends]


def _look(place: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    states: Tensor = output[0] if isinstance(output, tuple) else output
    if not bool(states.isfinite().all()):
        raise _Found(place, module)
