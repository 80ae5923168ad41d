"""Measures what this machine can do at most, in about five seconds: bytes read and products summed per second."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, TypedDict

import torch

from harness.bench.common import arguments
from harness.bench.common.measure import DTYPES, own_seconds
from harness.terminal.notices import say

READ_BYTES = {"cpu": 1 << 30, "cuda": 1 << 31}  # more than any cache holds
SIDE = {"cpu": 2048, "cuda": 8192}  # of the matrices


class Limits(TypedDict):
    """Holds the most that was measured: gigabytes per second and by what, and 10^9 operations per second by dtype."""

    read_gb_s: float
    read_by: str
    matmul_gflop_s: dict[str, float]


def measured(device: torch.device, budget_s: float = 5.0) -> Limits:
    """Return the best of many tries: of every way to read, and of products in every dtype."""
    readers = _readers(device)
    share, side = budget_s / (len(readers) + len(DTYPES)), SIDE[device.type]
    memory = torch.ones(READ_BYTES[device.type] // 4, dtype=torch.int32, device=device)
    reads = {name: memory.nbytes / _best(partial(read, memory), device, share) / 1e9 for name, read in readers.items()}
    products = {
        name: 2 * side**3 / _best(_product(side, dtype, device), device, share) / 1e9 for name, dtype in DTYPES.items()
    }
    by = max(reads, key=lambda name: reads[name])
    return {"read_gb_s": reads[by], "read_by": by, "matmul_gflop_s": products}


def told(device: str) -> Limits:
    """Return the limits, once they have been said."""
    limits = measured(arguments.current(device))
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


def _best(call: Callable[[], Any], device: torch.device, budget_s: float) -> float:
    call()
    until, best = perf_counter() + budget_s, own_seconds(call, device)
    while perf_counter() < until:
        best = min(best, own_seconds(call, device))
    return best
