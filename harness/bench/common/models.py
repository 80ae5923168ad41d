"""The model of a benchmark: the embedded one, or random weights of a named shape."""

from __future__ import annotations

from argparse import ArgumentParser

from harness.bench.common import arguments
from harness.models.base import DTYPES, LoadedModel
from harness.models.embedded import SmolLM2
from harness.models.random import Random


def add_run(parser: ArgumentParser) -> None:
    """What is measured on a whole model, turn by turn."""
    parser.add_argument("--rounds", type=arguments.count, default=5)
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--device", default="cpu", type=arguments.device)
    for name, default in {"shape": None, **arguments.OUT}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **arguments.OPTIONS[name])


def source(shape: str | None, layers: int | None = None) -> Random | SmolLM2:
    """`layers` of the random weights; None for all."""
    return Random(shape, layers, 0, "auto") if shape else SmolLM2()


def check_window(loaded: LoadedModel, tokens: int, new: int) -> None:
    """Raise `ValueError` where --tokens and --new are more than the model takes."""
    if tokens + new > loaded.window:
        raise ValueError(
            f"--tokens and --new make {tokens + new}, and {loaded.name} has a window of {loaded.window}: use fewer."
        )
