"""Runs k-means on many problems at once: two kernels per Lloyd round, with sums in a fixed order,
so that runs repeat exactly.

A round reads each point once, where it lies and in its own dtype. Centroids are fp32 numbers. For
points of 16 bits they are held as three parts of 16 bits, whose products with a point are exact.
Whether the centroids still move stays on the device: the kernels of all rounds are launched, and
after the last round that is needed they return at once. So the host never waits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import (
    load,
    padded,
    product,
    program_at,
    split,
    unfit_floats,
)

MOST_CHANNELS, MOST_CLUSTERS = 128, 1024
_AT_ONCE = 64  # clusters that points are compared with, or summed for, at once
_PIECES = tl.constexpr(8)  # sums of pieces that are added at once


def kmeans(
    x: Tensor, initial: Tensor, iterations: int, tolerance: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Cluster the points of each problem, as kernels/kmeans.py defines it: x [... P d], initial [C] ->
    centroids [... C d], codes [... P] (int32)."""
    points, dim = x.shape[-2:]
    problems, clusters = x.numel() // (points * dim), len(initial)
    centroids = (
        x[..., initial, :].to(torch.float32, memory_format=torch.contiguous_format).contiguous()
    )
    bounds = tolerance * x.var(dim=-2, correction=0).float().mean(-1).flatten()
    parts = _in_parts(centroids.view(problems, 1, clusters, dim), x.dtype)
    halves = centroids.square().sum(-1).mul_(0.5)
    at_once, rows = min(_AT_ONCE, padded(clusters)), 128 if x.element_size() == 2 else 32
    # the sums of all do not fit into registers: codes are written first, and read again
    many = clusters > at_once
    pieces, length = split(points, problems, rows)
    sums = torch.empty((pieces, problems, clusters, dim), dtype=torch.float32, device=x.device)
    counts = torch.empty((pieces, problems, clusters), dtype=torch.float32, device=x.device)
    blocks = padded(triton.cdiv(clusters, 16), 1)
    shifts = torch.full((iterations + 1, problems, blocks), float("inf"), device=x.device)
    codes = torch.empty((*x.shape[:-2], points), dtype=torch.int32, device=x.device)
    whole = x[(None,) * (5 - x.dim())]

    def assign(step: int, find: bool, add: bool, until: Tensor | None = shifts) -> None:
        _assign[(pieces, problems, triton.cdiv(clusters, at_once) if add else 1)](
            whole, parts, halves, sums, counts, codes, until, bounds, *whole.stride()[:4], step, problems, points,
            length, whole.shape[1], whole.shape[2], clusters, dim, at_once, rows, parts.shape[1], blocks, find, add,
            num_warps=8, num_stages=2,
        )  # fmt: skip

    for step in range(iterations):
        if many:
            assign(step, True, False)
        assign(step, not many, True)
        _move[(problems, blocks)](
            sums, counts, centroids, parts, halves, shifts, bounds, step, problems, pieces, clusters, dim,
            parts.shape[1], blocks,
        )  # fmt: skip
    assign(0, True, False, None)
    return centroids, codes


def kmeans_refuses(x, initial, *_):
    if (
        x.shape[-1] > MOST_CHANNELS
        or len(initial) > MOST_CLUSTERS
        or x.dim() > 5
        or x.stride(-1) != 1
    ):
        return (
            f"takes up to {MOST_CLUSTERS} clusters and {MOST_CHANNELS} channels, side by side, got {len(initial)} and "
            f"{x.shape[-1]}"
        )
    return unfit_floats(x)


def _in_parts(centroids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the parts of centroids [N 1 C d] (fp32) whose sum they are: in fp32 themselves, in 16 bits three,
    [N 3 C d]."""
    parts: list[Tensor] = []
    rest = centroids
    while dtype != torch.float32 and len(parts) < 3:
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return torch.cat(parts, 1) if parts else centroids


@triton.jit
def _still(shifts, bounds, problems, BLOCKS: tl.constexpr):
    """Return whether the centroids of every problem have moved by no more than their bound."""
    block = tl.arange(0, BLOCKS)
    moving = tl.zeros([], tl.int32)
    for start in range(0, problems, 32):
        problem = start + tl.arange(0, 32)
        shift = load(shifts + problem[:, None] * BLOCKS + block, (problem < problems)[:, None])
        bound = load(bounds + problem, problem < problems)
        moving += tl.sum((tl.sum(shift, 1) > bound).to(tl.int32), 0)
    return moving == 0


@triton.jit
def _near(
    value, parts, halves, cluster, channel, CLUSTERS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Return the products of points with some centroids, less half the squares of these: the larger,
    the nearer."""
    real = (cluster < CLUSTERS)[:, None] & (channel < DIM)
    at = parts + cluster[:, None] * DIM + channel
    near = product(value, tl.trans(load(at + (PARTS - 1) * CLUSTERS * DIM, real)))
    if PARTS > 1:  # the smallest first
        near += product(value, tl.trans(load(at + CLUSTERS * DIM, real)))
        near += product(value, tl.trans(load(at, real)))
    return near - tl.load(halves + cluster, mask=cluster < CLUSTERS, other=float("inf"))


@triton.jit(do_not_specialize=["step", "problems", "points", "length"])
def _assign(
    x, parts, halves, sums, counts, codes, shifts, bounds, xb: tl.int64, xg: tl.int64, xm: tl.int64, xt: tl.int64, step,
    problems, points, length, GROUPS: tl.constexpr, SPLIT: tl.constexpr, CLUSTERS: tl.constexpr, DIM: tl.constexpr,
    AT_ONCE: tl.constexpr, POINTS: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr, FIND: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Work on one piece of the points of one problem. If FIND says so, find for each point the
    nearest centroid, the first of equally near ones; else read its number from `codes`. If ADD says
    so, sum and count the points of each of a block of clusters; else write the numbers to
    `codes`."""
    piece, problem = tl.program_id(0), program_at(1)
    still = (
        False
        if shifts is None
        else _still(shifts + step * problems * BLOCKS, bounds, problems, BLOCKS)
    )
    if still:
        return
    x += problem // (GROUPS * SPLIT) * xb + problem // SPLIT % GROUPS * xg + problem % SPLIT * xm
    parts += problem * PARTS * CLUSTERS * DIM
    halves += problem * CLUSTERS
    each, channel = tl.arange(0, AT_ONCE), tl.arange(0, padded(DIM))
    cluster = tl.program_id(2) * AT_ONCE + each
    total = tl.zeros([AT_ONCE, channel.shape[0]], tl.float32)
    number = tl.zeros([AT_ONCE, 16], tl.float32)
    ones = tl.full([POINTS, 16], 1.0, tl.float32).to(x.dtype.element_ty)
    end = tl.minimum((piece + 1) * length, points)
    for start in range(piece * length, end, POINTS):
        point = start + tl.arange(0, POINTS)
        there = (point < end)[:, None] & (channel < DIM)
        value = load(x + point[:, None] * xt + channel, there)
        if FIND:
            near = _near(value, parts, halves, each, channel, CLUSTERS, DIM, PARTS)
            best, code = tl.max(near, 1, return_indices=True, return_indices_tie_break_left=True)
            for first in range(AT_ONCE, CLUSTERS, AT_ONCE):
                near = _near(value, parts, halves, first + each, channel, CLUSTERS, DIM, PARTS)
                top, place = tl.max(
                    near, 1, return_indices=True, return_indices_tie_break_left=True
                )
                code = tl.where(top > best, first + place, code)
                best = tl.maximum(best, top)
            # of a point with NaN it may be a cluster that is not there
            code = tl.minimum(code, CLUSTERS - 1)
        else:
            code = tl.load(codes + problem * points + point, mask=point < end, other=-1)
        if ADD:
            code = tl.where(point < end, code, -1)
            belongs = tl.trans((code[:, None] == cluster).to(tl.float32).to(value.dtype))
            total += product(belongs, value)
            number += product(belongs, ones)
        else:
            tl.store(codes + problem * points + point, code, mask=point < end)
    if ADD:
        to = (piece.to(tl.int64) * problems + problem) * CLUSTERS + cluster
        real = cluster < CLUSTERS
        tl.store(counts + to, tl.sum(number, 1) / 16, mask=real)
        tl.store(sums + to[:, None] * DIM + channel, total, mask=real[:, None] & (channel < DIM))


@triton.jit(do_not_specialize=["step", "problems", "pieces"])
def _move(
    sums, counts, centroids, parts, halves, shifts, bounds, step, problems, pieces, CLUSTERS: tl.constexpr,
    DIM: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Move 16 centroids of one problem to the means of their points; one without points stays. Write
    how far they moved, as the sum of squares."""
    problem, block = program_at(0), tl.program_id(1)
    shifts += step * problems * BLOCKS
    to = problem * BLOCKS + block
    if _still(shifts, bounds, problems, BLOCKS):
        tl.store(shifts + problems * BLOCKS + to, tl.load(shifts + to, mask=block < BLOCKS))
        return
    cluster, channel, each = (
        block * 16 + tl.arange(0, 16),
        tl.arange(0, padded(DIM)),
        tl.arange(0, _PIECES),
    )
    there = cluster < CLUSTERS
    real = there[:, None] & (channel < DIM)
    total = tl.zeros(real.shape, tl.float32)
    number = tl.zeros([16], tl.float32)
    for start in range(0, pieces, _PIECES):
        at = ((start + each).to(tl.int64) * problems + problem)[:, None] * CLUSTERS + cluster
        some = (start + each < pieces)[:, None] & there
        number += tl.sum(load(counts + at, some), 0)
        some = some[:, :, None] & (channel < DIM)
        total += tl.sum(load(sums + at[:, :, None] * DIM + channel, some), 0)
    place = (problem * CLUSTERS + cluster)[:, None] * DIM + channel
    old = load(centroids + place, real)
    moved = tl.where((number > 0)[:, None], total / tl.maximum(number, 1.0)[:, None], old)
    tl.store(centroids + place, moved, mask=real)
    tl.store(halves + problem * CLUSTERS + cluster, 0.5 * tl.sum(moved * moved, 1), mask=there)
    if PARTS > 1:
        rest = moved
        at = parts + place + problem * ((PARTS - 1) * CLUSTERS * DIM)
        for part in tl.static_range(PARTS):
            rounded = rest.to(parts.dtype.element_ty)
            tl.store(at + part * CLUSTERS * DIM, rounded, mask=real)
            rest -= rounded.to(tl.float32)
    gone = tl.sum(tl.sum((moved - old) * (moved - old), 1), 0)
    tl.store(shifts + problems * BLOCKS + to, gone)
