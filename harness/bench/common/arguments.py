"""What several benchmarks can be told on the command line."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path

import torch

from harness.bench.common.measure import DTYPES
from harness.models.base import ModelError, check_device


def budget(text: str) -> float:
    """A number of tokens, or with a point a share of the prompt."""
    return float(text) if "." in text else int(text)


def count(text: str) -> int:
    """From 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text} should be a whole number, at least 1")
    return int(text)


def folder(text: str) -> str:
    """One that exists."""
    if not Path(text).expanduser().is_dir():
        raise ArgumentTypeError(f"{text} is not a folder")
    return text


def device(text: str) -> str:
    """One that this machine has."""
    try:
        return check_device(text)
    except ModelError as error:
        raise ArgumentTypeError(str(error)) from None


def current(name: str) -> torch.device:
    """That device, made the current one where it is a numbered GPU: kernels are launched on no other."""
    chosen = torch.device(name)
    if chosen.index is not None:  # torch refuses a plain "cuda", which is the current one anyway
        torch.cuda.set_device(chosen)
    return chosen


def add_shape(parser: ArgumentParser) -> None:
    """One attention layer."""
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)


def add_method(parser: ArgumentParser) -> None:
    parser.add_argument("--methods", nargs="*", default=[], help="names, or quest:select_per=kv_head; all by default")
    parser.add_argument("--placement", default="device", choices=("device", "host"))
    parser.add_argument("--reuse-steps", type=int, default=0)


def add_run(parser: ArgumentParser, rounds: int = 15) -> None:
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--device", default="cpu", type=device)
    parser.add_argument("--rounds", type=count, default=rounds)
    add_out(parser)


def add_out(parser: ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, help="begin no further row after that long")
    parser.add_argument("--no-plot", action="store_true", help="the table and the figures alone")
    parser.add_argument("--out", type=Path, help="folder for the table, the figures and the picture")
