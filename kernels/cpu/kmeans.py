"""Runs k-means on many problems at once, compiled (kmeans.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.ffi.bindings import Function, Struct, floats, int32s, integer, real
from kernels.cpu.ffi.library import load
from kernels.kmeans import in_fp32


class KMeans(Struct):
    """Describe a call of the compiled k-means, which clusters the points of each problem."""

    x = floats("problems * points * dim")
    # the initial ones, then the final ones
    centroids = floats("problems * clusters * dim", written=True)
    codes = int32s("problems * points", written=True)
    problems = points = dim = clusters = integer()
    iterations = integer(0)
    tolerance = real()


_library = load("kmeans", Function("kmeans", KMeans))

_MOST_CLUSTERS = 4096  # because each 4096 points need a table of sums


def kmeans(
    x: Tensor, initial: Tensor, iterations: int, tolerance: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Cluster the points of each problem, as kernels/kmeans.py defines it: x [... P d], initial [C]
    -> centroids [... C d], codes [... P] (int32)."""
    leading, x = x.shape[:-2], in_fp32(x)
    problems, points, dim = x.shape
    centroids = x[:, initial]
    codes = torch.empty(problems, points, dtype=torch.int32)
    _library.kmeans(
        x=x, centroids=centroids, codes=codes, problems=problems, points=points, dim=dim, clusters=len(initial),
        iterations=iterations, tolerance=tolerance,
    )  # fmt: skip
    return centroids.view(*leading, -1, dim), codes.view(*leading, points)


def kmeans_refuses(x, initial, iterations, tolerance=1e-4):
    if x.is_cuda:
        return f"takes points on the CPU, got {x.device}"
    return (
        None
        if len(initial) <= _MOST_CLUSTERS
        else f"takes up to {_MOST_CLUSTERS} clusters, got {len(initial)}"
    )
