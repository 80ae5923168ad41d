"""What several benchmarks can be told on the command line."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from math import inf, nan
from pathlib import Path

import torch

from harness.bench.common.measure import DTYPES
from harness.bench.common.synthetic import Shape
from harness.config.settings import is_budget
from harness.models.devices import DeviceError, check_device
from methods.tiers.tier import DEVICE, TIERS


def budget(text: str) -> float:
    """A number of tokens, or with a point a share of the prompt."""
    number = _number(text)
    asked = int(number) if text.isdecimal() else number
    if not is_budget(asked):
        raise ArgumentTypeError(f"{text} should be a share above 0 and up to 1, as 0.2, or a number of tokens, as 512")
    return asked


def count(text: str) -> int:
    """From 1 on."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """From 0 on."""
    return _whole(text, 0)


def positive(text: str) -> float:
    """Above 0."""
    if not 0 < (number := _number(text)) < inf:
        raise ArgumentTypeError(f"{text} should be a number above 0")
    return number


def share(text: str) -> float:
    """Above 0 and up to 1."""
    if not 0 < (number := _number(text)) <= 1:
        raise ArgumentTypeError(f"{text} should be a share above 0 and up to 1")
    return number


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text} should be a whole number, at least {least}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan


def folder(text: str) -> str:
    """One that exists."""
    if not Path(text).expanduser().is_dir():
        raise ArgumentTypeError(f"{text} is not a folder")
    return text


def device(text: str) -> str:
    """One that this machine has."""
    try:
        return check_device(text)
    except DeviceError as error:
        raise ArgumentTypeError(str(error)) from None


def current(name: str) -> torch.device:
    """That device, made the current one where it is a numbered GPU: kernels are launched on no other."""
    chosen = torch.device(name)
    if chosen.index is not None:  # torch refuses a plain "cuda", which is the current one anyway
        torch.cuda.set_device(chosen)
    return chosen


def add_shape(parser: ArgumentParser) -> None:
    """One attention layer, for `shape`."""
    parser.add_argument("--heads", type=count, default=32)
    parser.add_argument("--kv-heads", type=count, default=8)
    parser.add_argument("--head-dim", type=count, default=128)


def shape(options: Namespace, device: str = "cpu") -> Shape:
    """What `add_shape` asked for, in the dtype of the options."""
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
    return Shape(heads, kv_heads, dim, DTYPES[options.dtype], torch.device(device))


def add_method(parser: ArgumentParser) -> None:
    parser.add_argument("--methods", nargs="*", default=[], help="names, or quest:select_per=kv_head; all by default")
    parser.add_argument("--placement", default=DEVICE, choices=tuple(TIERS))
    parser.add_argument("--reuse-steps", type=natural, default=0)


def add_run(parser: ArgumentParser, rounds: int = 15) -> None:
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--device", default="cpu", type=device)
    parser.add_argument("--rounds", type=count, default=rounds)
    add_out(parser)


def add_out(parser: ArgumentParser) -> None:
    parser.add_argument("--minutes", type=positive, help="begin no further row after that long")
    parser.add_argument("--no-plot", action="store_true", help="the table and the figures alone")
    parser.add_argument("--out", type=Path, help="folder for the table, the figures and the picture")
