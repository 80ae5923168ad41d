"""Runs k-means on many small problems at once, by Lloyd's iterations."""

from __future__ import annotations

import torch
from torch import Tensor

_POINTS_AT_ONCE = 1 << 15  # bounds the [N points C] distance block


def assign(x: Tensor, centroids: Tensor) -> Tensor:
    """Find the nearest centroid (squared L2) of each point. x [N P d], centroids [N C d] ->
    [N P]"""
    half_norms = centroids.square().sum(-1).unsqueeze(1).mul_(0.5)
    blocks = x.split(_POINTS_AT_ONCE, dim=1)
    return torch.cat(
        [(block @ centroids.transpose(1, 2)).sub_(half_norms).argmax(-1) for block in blocks], dim=1
    )


def kmeans(
    x: Tensor, initial: Tensor, iterations: int, tolerance: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Cluster the P points of each problem into C clusters, starting from the points `initial` as
    centroids. It computes in fp32, whatever the dtype of the points.

    x [... P d], initial [C] -> centroids [... C d] (fp32), codes [... P], the cluster of each point

    It stops after `iterations` rounds, or once the summed squared movement of the centroids is
    below `tolerance` times the mean variance of the data in every problem (scikit-learn's rule). A
    cluster without points keeps its centroid. The codes belong to the centroids returned."""
    leading = x.shape[:-2]
    x = in_fp32(x)
    problems, points, dim = x.shape
    centroids = x[:, initial].clone()
    bound = tolerance * x.var(dim=1, correction=0).mean(-1)  # [N]
    first = torch.arange(problems, device=x.device).unsqueeze(1) * len(initial)
    ones = x.new_ones(problems * points)
    for _ in range(iterations):
        slots = (assign(x, centroids) + first).view(-1)
        sums = x.new_zeros(problems * len(initial), dim).index_add_(0, slots, x.reshape(-1, dim))
        counts = x.new_zeros(problems * len(initial)).index_add_(0, slots, ones).unsqueeze(1)
        moved = torch.where(
            counts > 0, sums / counts.clamp(min=1), centroids.view(-1, dim)
        ).view_as(centroids)
        shift = (moved - centroids).square().sum((1, 2))
        centroids = moved
        if bool((shift <= bound).all()):
            break
    return centroids.view(*leading, -1, dim), assign(x, centroids).view(*leading, points)


def in_fp32(x: Tensor) -> Tensor:
    """Return points x [... P d] as they are computed with, [N P d] in fp32, side by side."""
    return x.to(torch.float32, memory_format=torch.contiguous_format).contiguous().flatten(0, -3)
