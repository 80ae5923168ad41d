"""What this machine can do at most: bytes read and products summed per second. Takes about five seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, TypedDict

import torch

from harness.bench.measure import seconds

READ_BYTES = {"cpu": 1 << 30, "cuda": 1 << 31}  # more than any cache holds
SIDE = {"cpu": 2048, "cuda": 8192}  # of the matrices
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Limits(TypedDict):
    read_gb_s: float
    read_by: str
    matmul_gflop_s: dict[str, float]


def calibrate(device: torch.device, budget_s: float = 5.0) -> Limits:
    """The best of many tries, since the limit is asked for."""
    memory = torch.ones(READ_BYTES[device.type] // 4, dtype=torch.int32, device=device)
    readers = _readers(device)
    share = budget_s / (len(readers) + len(DTYPES))
    speeds = {name: memory.nbytes / _best(partial(read, memory), device, share) / 1e9 for name, read in readers.items()}
    best = max(speeds, key=lambda name: speeds[name])
    side = SIDE[device.type]
    products = {
        name: 2 * side**3 / _best(_product(side, dtype, device), device, share) / 1e9 for name, dtype in DTYPES.items()
    }
    return {"read_gb_s": speeds[best], "read_by": best, "matmul_gflop_s": products}


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


def _best(call: Callable[[], Any], device: torch.device, budget_s: float) -> float:
    call()
    until, best = perf_counter() + budget_s, float("inf")
    while perf_counter() < until:
        best = min(best, seconds(call, device))
    return best
