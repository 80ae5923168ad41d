"""Batched k-means, compiled: kmeans.cpp."""

from __future__ import annotations

from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor

from kernels.cpu.library import load

_kmeans = load("kmeans").kmeans
_kmeans.argtypes = [*[c_void_p] * 3, *[c_int64] * 5, c_double]
_kmeans.restype = None

_MOST_CLUSTERS = 4096  # a table of sums per 4096 points


def kmeans(x: Tensor, initial: Tensor, iterations: int, tolerance: float = 1e-4) -> tuple[Tensor, Tensor]:
    """As in kernels/kmeans.py; codes are int32."""
    x = x.contiguous()
    problems, points, dim = x.shape
    centroids = x[:, initial]
    codes = torch.empty(problems, points, dtype=torch.int32)
    _kmeans(
        x.data_ptr(), centroids.data_ptr(), codes.data_ptr(), problems, points, dim, len(initial), iterations, tolerance
    )
    return centroids, codes


def kmeans_refuses(x: Tensor, initial: Tensor, iterations: int, tolerance: float = 1e-4) -> str | None:
    if x.is_cuda or x.dtype != torch.float32:
        return f"takes float32 on the CPU, got {x.dtype} on {x.device}"
    return None if len(initial) <= _MOST_CLUSTERS else f"takes up to {_MOST_CLUSTERS} clusters, got {len(initial)}"
