"""Finds vectors that are alike, compiled (alike.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.ffi.bindings import Function, Struct, floats, int64s, integer, real
from kernels.cpu.ffi.library import load
from kernels.reference import unit_vectors


class LastAlike(Struct):
    """Describe a call of the compiled function that finds for each unit vector the last other one
    that is like it. A pair is one KV head of one sequence."""

    units = floats("pairs * count * dim")
    last = int64s("pairs * count", written=True)
    pairs = count = dim = integer()
    threshold = real()


_library = load(
    "alike", Function("last_alike", LastAlike), Function("is_on_tiles", returns="int64_t")
)


def last_alike(keys: Tensor, threshold: float) -> Tensor:
    """Find the last other key that is like each one, as kernels/reference.py defines it."""
    units = unit_vectors(keys)
    last = torch.empty(units.shape[:3], dtype=torch.int64)
    _library.last_alike(
        units=units.contiguous(), last=last, pairs=last[..., 0].numel(), count=units.shape[2], dim=units.shape[3],
        threshold=threshold,
    )  # fmt: skip
    return last


def last_alike_refuses(keys, threshold):
    if keys.is_cuda or not keys.numel():
        return f"takes keys on the CPU, got {list(keys.shape)} on {keys.device}"
    return None
