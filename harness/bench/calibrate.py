"""What this machine can do at most: bytes read and copied, and products summed per second. Takes about five seconds.

Writes machine.yaml beside the table, which `python -m harness.plan --machine` takes.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple, TypedDict

import torch

from harness.bench.common import arguments, output
from harness.bench.common.load import MarkedSeconds
from harness.bench.common.measure import DTYPES, marks, own_seconds
from harness.bench.common.output import Cell
from harness.jobs.planning.free_memory import free_bytes
from harness.machines.machine import Machine, write
from harness.terminal.notices import say

TO_DEVICE, TO_HOST = "copies to the device", "copies to the host"
READ_BYTES = {"cpu": 1 << 30, "cuda": 1 << 31}  # more than any cache holds
SIDE = {"cpu": 2048, "cuda": 8192}  # of the matrices


class Limits(TypedDict):
    read_gb_s: float
    read_by: str
    matmul_gflop_s: dict[str, float]


class MeasuredSpeed(NamedTuple):
    """The best of many tries, since the limit is asked for."""

    what: str
    unit: str
    value: float
    tries: list[MarkedSeconds]


def calibrate(device: torch.device, budget_s: float = 5.0) -> Limits:
    found = {speed.what: speed.value for speed in speeds(device, budget_s)}
    readers = {what: value for what, value in found.items() if what not in DTYPES}
    best = max(readers, key=lambda what: readers[what])
    products = {dtype: found[dtype] for dtype in DTYPES}
    return {"read_gb_s": found[best], "read_by": best, "matmul_gflop_s": products}


def speeds(device: torch.device, budget_s: float = 5.0) -> Iterator[MeasuredSpeed]:
    """Of every way to read, then of products in every dtype."""
    readers = _readers(device)
    share, side = budget_s / (len(readers) + len(DTYPES)), SIDE[device.type]
    memory = torch.ones(READ_BYTES[device.type] // 4, dtype=torch.int32, device=device)
    for what, read in readers.items():
        tries = _tries(partial(read, memory), device, share)
        yield MeasuredSpeed(what, "GB/s", memory.nbytes / min(tries) / 1e9, tries)
    for what, dtype in DTYPES.items():
        tries = _tries(_product(side, dtype, device), device, share)
        yield MeasuredSpeed(what, "GFLOP/s", 2 * side**3 / min(tries) / 1e9, tries)


def copies(device: torch.device, budget_s: float) -> Iterator[MeasuredSpeed]:
    """In both directions between the device and pinned host memory; on a CPU, whose host memory is its own, within
    it."""
    here = torch.ones(READ_BYTES[device.type] // 8, dtype=torch.int32, device=device)
    there = torch.ones(here.shape, dtype=here.dtype, pin_memory=device.type == "cuda")
    for what, into, out_of in ((TO_DEVICE, here, there), (TO_HOST, there, here)):
        tries = _tries(partial(into.copy_, out_of), device, budget_s / 4)
        yield MeasuredSpeed(what, "GB/s", here.nbytes / min(tries) / 1e9, tries)


def machine(device: torch.device, found: Mapping[str, float]) -> Machine:
    """Of the speeds that were found. What is free now can be used, so nothing is kept back."""
    reads = max(value for what, value in found.items() if what not in (*DTYPES, TO_DEVICE, TO_HOST))
    return Machine(
        name=platform.node() or "here",
        device=device.type,
        device_bytes=free_bytes(str(device)) or 0,
        host_bytes=None if device.type == "cpu" else free_bytes("cpu"),
        read_gb_s=_digits(reads),
        matmul_gflop_s={dtype: _digits(found[dtype]) for dtype in DTYPES},
        to_device_gb_s=_digits(found[TO_DEVICE]),
        to_host_gb_s=_digits(found[TO_HOST]),
        basis="measured",
        source="python -m harness.bench calibrate",
    )


def _digits(speed: float) -> float:
    """As exact as a measurement is; a slow machine's speed, too, is above 0."""
    return float(f"{speed:.3g}")


def told(device: str) -> Limits:
    """The limits, said before what is held against them."""
    limits = calibrate(arguments.current(device))
    products = ", ".join(f"{name} {speed:,.0f}" for name, speed in limits["matmul_gflop_s"].items())
    say(f"limits here: {limits['read_gb_s']:,.1f} GB/s read ({limits['read_by']}), matmul GFLOP/s: {products}")
    return limits


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


def _tries(call: Callable[[], Any], device: torch.device, budget_s: float) -> list[MarkedSeconds]:
    call()
    until, tries = perf_counter() + budget_s, [own_seconds(call, device)]
    while perf_counter() < until:
        tries.append(own_seconds(call, device))
    return tries


TABLE = output.table(Cell("limit", "what", left=True), Cell("best", "value"), Cell("unit", "unit", left=True))


def parser() -> argparse.ArgumentParser:
    return arguments.parser("calibrate", __doc__, device="cpu", seconds=5.0, out=None)


def main(options: argparse.Namespace) -> None:
    report = output.Report("calibrate", f"Limits of this machine, {options.device}", options, TABLE)
    device, found = arguments.current(options.device), dict[str, float]()
    for what, unit, value, tries in chain(speeds(device, options.seconds), copies(device, options.seconds)):
        row = {"what": what, "unit": unit, "value": value, **marks(tries)}
        report.add(row, f"{what}: {value:,.1f} {unit}")
        found[what] = value
    report.finish()
    write(report.folder / "machine.yaml", machine(device, found))
