"""Runs k-means on many problems at once: two kernels per Lloyd round, with sums in a fixed order,
so that runs repeat exactly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import padded, product, split, unfit

# Twice as much of any of these spills registers on sm_80
_POINTS = 128  # points that are assigned at once
_COMPARED = 32  # clusters that they are compared with at once
_SUMMED = 32  # points that are summed at once
_CLUSTERS = 64  # clusters that they are summed for at once
MOST_CHANNELS = 128


def kmeans(x: Tensor, initial: Tensor, iterations: int, tolerance: float = 1e-4) -> tuple[Tensor, Tensor]:
    """Cluster the points of each of N problems, as kernels/kmeans.py defines it: x [N P d], initial
    [C] -> centroids [N C d], codes [N P] (int32). After each round the host reads whether all
    problems have converged."""
    x = x.contiguous()
    centroids = x[:, initial].contiguous()
    bound = tolerance * x.var(dim=1, correction=0).mean(-1)
    for _ in range(iterations):
        moved = _means(x, _assign(x, centroids), centroids)
        shift = (moved - centroids).square().sum((1, 2))
        centroids = moved
        if bool((shift <= bound).all()):
            break
    return centroids, _assign(x, centroids)


def kmeans_refuses(x: Tensor, initial: Tensor, iterations: int, tolerance: float = 1e-4) -> str | None:
    if x.dtype != torch.float32 or x.shape[2] > MOST_CHANNELS:
        return f"takes float32 of up to {MOST_CHANNELS} channels, got {x.dtype} of {x.shape[2]}"
    return unfit(x, initial)


def _assign(x: Tensor, centroids: Tensor) -> Tensor:
    (problems, points, dim), clusters = x.shape, centroids.shape[1]
    codes = torch.empty((problems, points), dtype=torch.int32, device=x.device)
    share = 1 if dim <= 64 else 2  # wide points and centroids: half as many fit
    _nearest[(triton.cdiv(points, _POINTS // share), problems)](
        x, centroids, codes, points, clusters, dim, padded(dim), _POINTS // share, _COMPARED // share, num_warps=8,
        num_stages=2,
    )  # fmt: skip
    return codes


def _means(x: Tensor, codes: Tensor, centroids: Tensor) -> Tensor:
    """Return the mean of the points x [N P d] of each cluster, [N C d], where codes [N P] say which
    cluster a point is in; one without points keeps its centroid."""
    (problems, points, dim), clusters = x.shape, centroids.shape[1]
    blocks = triton.cdiv(clusters, _CLUSTERS)
    pieces, length = split(points, problems * blocks, _SUMMED)
    sums = x.new_empty((pieces, problems, clusters, dim))
    counts = x.new_empty((pieces, problems, clusters))
    _sums[(problems, blocks, pieces)](
        x, codes, sums, counts, points, length, clusters, dim, padded(dim), _SUMMED, _CLUSTERS, num_warps=8,
        num_stages=2,
    )  # fmt: skip
    total = counts.sum(0).unsqueeze(2)
    return torch.where(total > 0, sums.sum(0) / total.clamp(min=1), centroids)


@triton.jit(do_not_specialize=["points"])
def _nearest(
    x, centroids, codes, points, CLUSTERS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, POINTS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Write to `codes` the number of the nearest centroid for each point of a block of one problem;
    of equally near ones the first."""
    problem = tl.program_id(1).to(tl.int64)
    point, channel = tl.program_id(0) * POINTS + tl.arange(0, POINTS), tl.arange(0, WIDE)
    there = (point < points)[:, None] & (channel < DIM)
    mine = tl.load(x + (problem * points + point)[:, None] * DIM + channel, mask=there, other=0.0)
    best = tl.full([POINTS], float("-inf"), tl.float32)
    code = tl.zeros([POINTS], tl.int32)
    for start in range(0, CLUSTERS, STEP):
        cluster = start + tl.arange(0, STEP)
        real = (cluster < CLUSTERS)[:, None] & (channel < DIM)
        centroid = tl.load(centroids + (problem * CLUSTERS + cluster)[:, None] * DIM + channel, mask=real, other=0.0)
        near = product(mine, tl.trans(centroid)) - 0.5 * tl.sum(centroid * centroid, 1)
        near = tl.where(cluster < CLUSTERS, near, float("-inf"))
        top = tl.max(near, 1)
        code = tl.where(top > best, start + tl.argmax(near, 1), code)
        best = tl.maximum(best, top)
    tl.store(codes + problem * points + point, code, mask=point < points)


@triton.jit(do_not_specialize=["points", "length"])
def _sums(
    x, codes, sums, counts, points, length, CLUSTERS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    POINTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sum and count the points of each cluster, for a block of clusters of one problem, over one
    piece of its points."""
    problem, piece = tl.program_id(0).to(tl.int64), tl.program_id(2)
    cluster, channel = tl.program_id(1) * STEP + tl.arange(0, STEP), tl.arange(0, WIDE)
    total = tl.zeros([STEP, WIDE], tl.float32)
    number = tl.zeros([STEP], tl.float32)
    end = tl.minimum((piece + 1) * length, points)
    for start in range(piece * length, end, POINTS):
        point = start + tl.arange(0, POINTS)
        code = tl.load(codes + problem * points + point, mask=point < end, other=-1)
        there = (point < end)[:, None] & (channel < DIM)
        value = tl.load(x + (problem * points + point)[:, None] * DIM + channel, mask=there, other=0.0)
        belongs = (cluster[:, None] == code).to(tl.float32)
        total += product(belongs, value)
        number += tl.sum(belongs, 1)
    at = (piece.to(tl.int64) * tl.num_programs(0) + problem) * CLUSTERS + cluster
    real = cluster < CLUSTERS
    tl.store(counts + at, number, mask=real)
    tl.store(sums + at[:, None] * DIM + channel, total, mask=real[:, None] & (channel < DIM))
