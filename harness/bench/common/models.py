"""The model of a benchmark: the embedded one, or random weights of a named shape."""

from __future__ import annotations

from argparse import Namespace

from harness.models.base import LoadedModel
from harness.models.embedded import SmolLM2
from harness.models.random import Random
from harness.prompts.calibration import calibration_text


def source(shape: str | None, layers: int | None = None) -> Random | SmolLM2:
    """`layers` of the random weights; None for all."""
    return Random(shape, layers, 0, "auto") if shape else SmolLM2()


def opened(options: Namespace, tokens: int, new: int) -> tuple[LoadedModel, list[int]]:
    """The model, and so many tokens of a text; `new` ones may come behind it."""
    chosen = source(options.shape)
    loaded = chosen.load(options.dtype, options.device)
    check_window(loaded, tokens, new)
    return loaded, calibration_text(chosen.tokenizer(), tokens)


def check_window(loaded: LoadedModel, tokens: int, new: int) -> None:
    """Raise `ValueError` where --tokens and --new are more than the model takes."""
    if tokens + new > loaded.window:
        raise ValueError(
            f"--tokens and --new make {tokens + new}, and {loaded.name} has a window of {loaded.window}: use fewer."
        )
