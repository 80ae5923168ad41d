"""What this machine can do at most: bytes read and products summed per second. Takes about five seconds."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypedDict

import torch

from harness.bench.common import arguments, output
from harness.bench.common.measure import DTYPES, Seconds, marks, own_seconds
from harness.terminal.tables import Column

READ_BYTES = {"cpu": 1 << 30, "cuda": 1 << 31}  # more than any cache holds
SIDE = {"cpu": 2048, "cuda": 8192}  # of the matrices


class Limits(TypedDict):
    read_gb_s: float
    read_by: str
    matmul_gflop_s: dict[str, float]


class Speed(NamedTuple):
    """The best of many tries, since the limit is asked for."""

    what: str
    unit: str
    value: float
    tries: list[Seconds]


def calibrate(device: torch.device, budget_s: float = 5.0) -> Limits:
    found = {speed.what: speed.value for speed in speeds(device, budget_s)}
    readers = {what: value for what, value in found.items() if what not in DTYPES}
    best = max(readers, key=lambda what: readers[what])
    products = {dtype: found[dtype] for dtype in DTYPES}
    return {"read_gb_s": found[best], "read_by": best, "matmul_gflop_s": products}


def speeds(device: torch.device, budget_s: float = 5.0) -> Iterator[Speed]:
    """Of every way to read, then of products in every dtype."""
    readers = _readers(device)
    share, side = budget_s / (len(readers) + len(DTYPES)), SIDE[device.type]
    memory = torch.ones(READ_BYTES[device.type] // 4, dtype=torch.int32, device=device)
    for what, read in readers.items():
        tries = _tries(partial(read, memory), device, share)
        yield Speed(what, "GB/s", memory.nbytes / min(tries) / 1e9, tries)
    for what, dtype in DTYPES.items():
        tries = _tries(_product(side, dtype, device), device, share)
        yield Speed(what, "GFLOP/s", 2 * side**3 / min(tries) / 1e9, tries)


def line(limits: Limits) -> str:
    products = ", ".join(f"{name} {speed:,.0f}" for name, speed in limits["matmul_gflop_s"].items())
    return f"limits here: {limits['read_gb_s']:,.1f} GB/s read ({limits['read_by']}), matmul GFLOP/s: {products}"


def _readers(device: torch.device) -> dict[str, Callable[[torch.Tensor], Any]]:
    readers: dict[str, Callable[[torch.Tensor], Any]] = {"torch.sum": lambda x: x.view(torch.float32).sum()}
    if device.type == "cpu":
        try:
            from kernels.cpu.bandwidth import read
        except ImportError:
            pass  # no compiler: torch's sum stands alone
        else:
            readers["compiled loop"] = read
    return readers


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    return lambda: a @ b


def _tries(call: Callable[[], Any], device: torch.device, budget_s: float) -> list[Seconds]:
    call()
    until, tries = perf_counter() + budget_s, [own_seconds(call, device)]
    while perf_counter() < until:
        tries.append(own_seconds(call, device))
    return tries


def table(rows: Sequence[output.Row]) -> list[Column]:
    return [
        output.column("limit", "", rows, lambda row: row["what"], left=True),
        output.column("best", "", rows, lambda row: row["value"]),
        output.column("unit", "", rows, lambda row: row["unit"], left=True),
    ]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.bench calibrate", description=__doc__)
    parser.add_argument("--device", default="cpu", type=arguments.device)
    parser.add_argument("--seconds", type=arguments.positive, default=5.0)
    parser.add_argument("--out", type=Path, help="folder for the table and the figures")
    options = parser.parse_args(words)
    report = output.Report("calibrate", f"Limits of this machine, {options.device}", options, table)
    for what, unit, value, tries in speeds(arguments.current(options.device), options.seconds):
        row = {"what": what, "unit": unit, "value": value, **marks(tries)}
        report.add(row, f"{what}: {value:,.1f} {unit}")
    report.finish()
    return 0
