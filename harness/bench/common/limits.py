"""Measures the limits of this machine in about five seconds: bytes read per second, and
floating-point operations per second."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any, TypedDict

import torch

from harness.bench.common.measure import DTYPES, own_seconds
from harness.terminal.notices import say
from kernels.matmul import matmul

READ_BYTES = {"cpu": 1 << 30, "cuda": 1 << 31}  # more than any cache holds
SIDE = {"cpu": 2048, "cuda": 8192}  # of the matrices


class Limits(TypedDict):
    """The best speeds that were measured: gigabytes read per second, and GFLOP/s by dtype."""

    read_gb_s: float
    matmul_gflop_s: dict[str, float]


@cache
def measured(device: torch.device, budget_s: float = 5.0) -> Limits:
    """Return the best speeds of a device: that of reading, from many sums over a large memory, and
    that of computing, from many matrix products in each dtype. `budget_s`: the seconds that all
    this may take, once in a process."""
    share, side = budget_s / (1 + len(DTYPES)), SIDE[device.type]
    memory = torch.ones(READ_BYTES[device.type] // 4, device=device)
    read_s = _best(memory.sum, device, share)
    products = {
        name: 2 * side**3 / _best(_product(side, dtype, device), device, share) / 1e9
        for name, dtype in DTYPES.items()
    }
    return {"read_gb_s": memory.nbytes / read_s / 1e9, "matmul_gflop_s": products}


def told(device: str) -> Limits:
    """Measure the best speeds of a device, at which it reads memory and multiplies matrices; print
    them and return them."""
    chosen = torch.device(device)
    # kernels are launched on torch's current GPU only; torch refuses a plain "cuda", which is that one anyway
    if chosen.index is not None:
        torch.cuda.set_device(chosen)
    limits = measured(chosen)
    products = ", ".join(f"{name} {speed:,.0f}" for name, speed in limits["matmul_gflop_s"].items())
    say(f"limits here: {limits['read_gb_s']:,.1f} GB/s read, matmul GFLOP/s: {products}")
    return limits


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    return lambda: matmul(a, b)


def _best(call: Callable[[], Any], device: torch.device, budget_s: float) -> float:
    call()
    until, best = perf_counter() + budget_s, own_seconds(call, device)
    while perf_counter() < until:
        best = min(best, own_seconds(call, device))
    return best
