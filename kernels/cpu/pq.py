"""Weighs product-quantised keys, compiled (pq.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.ffi.bindings import (
    Function,
    Struct,
    anything,
    elements,
    floats,
    int64s,
    integer,
    real,
)
from kernels.cpu.ffi.library import load
from kernels.ragged import Ragged, parts_of, with_sizes


class PQWeights(Struct):
    """Describe a call of the compiled function that computes softmax weights of product-quantised
    keys from the products of queries with centroids. A pair is one KV head of one sequence."""

    q = elements("pairs * heads * parts * width")
    centroids = elements()  # [G m C d'] of each sequence
    codes = anything()  # [G S m] of each sequence, of `code_bytes` bytes each
    # [B 3], tables of `Ragged`, instead of the addresses above
    of_centroids = of_codes = int64s(optional=True)
    # [B], C and S of each sequence, instead of `clusters` and `count`
    sizes = counts = int64s(optional=True)
    out = floats("pairs * count", written=True)
    code_bytes = pairs = groups = heads = parts = clusters = width = count = integer()
    scale = real()


_library = load("pq", Function("pq_weights", PQWeights))


def pq_weights(
    q: Tensor, centroids: Tensor | Ragged, codes: Tensor | Ragged, scale: float
) -> Tensor | Ragged:
    """Compute the softmax weights [B G S] of product-quantised keys, summed over a group's query
    heads, as kernels/reference.py defines it. q [B H 1 D], centroids [B G m C d'], codes
    [B G S m]."""
    batch, groups, parts, clusters, width = centroids.shape
    count = codes.shape[2]
    out = q.new_empty((batch, groups, count), dtype=torch.float32)
    if count:
        one, of_centroids, sizes = parts_of(centroids, q.device)
        first, of_codes, counts = parts_of(codes, q.device)
        _library.pq_weights(
            q=q.contiguous(), centroids=one.contiguous(), codes=first.contiguous(), of_centroids=of_centroids,
            of_codes=of_codes, sizes=sizes, counts=counts, out=out,
            code_bytes=codes.dtype.itemsize, pairs=batch * groups, groups=groups, heads=q.shape[1] // groups,
            parts=parts, clusters=clusters, width=width, count=count, scale=scale,
        )  # fmt: skip
    return with_sizes(out, codes)


def pq_weights_refuses(q, centroids, codes, scale):
    if isinstance(codes, Ragged) != isinstance(centroids, Ragged):
        return "takes centroids of each sequence beside codes of each"
    if (
        isinstance(codes, Ragged)
        and isinstance(centroids, Ragged)
        and not (codes.dense and centroids.dense)
    ):
        return "needs centroids and codes without gaps"
    if q.is_cuda or q.dtype not in (torch.float32, torch.bfloat16) or centroids.dtype != q.dtype:
        return f"takes float32 or bfloat16 on the CPU, got {q.dtype} and {centroids.dtype} on {q.device}"
    if codes.dtype not in (torch.uint8, torch.int32):
        return f"takes codes of uint8 or int32, got {codes.dtype}"
    if q.shape[1] > 16 * centroids.shape[1]:
        return f"takes up to 16 query heads per KV head, got {q.shape[1] // centroids.shape[1]}"
    return None
