"""Weighs product-quantised keys, compiled (pq.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.ffi.bindings import Function, Struct, anything, elements, floats, int64s, integer, real
from kernels.cpu.ffi.library import load
from kernels.ragged import Ragged


class PQWeights(Struct):
    """Describes a call that weighs coded keys by their centroids' products with the queries."""

    q = elements("pairs * heads * parts * width")
    centroids = elements()  # [G m C d'] of each sequence
    codes = anything()  # [G S m] of each sequence, of `code_bytes` bytes each
    tables = int64s(optional=True)  # [B 4] of each sequence: addresses of centroids and codes, C and S
    out = floats("pairs * count", written=True)
    code_bytes = pairs = groups = heads = parts = clusters = width = count = integer()
    scale = real()


_library = load("pq", Function("pq_weights", PQWeights))


def pq_weights(q: Tensor, centroids: Tensor | Ragged, codes: Tensor | Ragged, scale: float) -> Tensor | Ragged:
    """Compute the softmax weights of coded keys, summed over a group, as kernels/reference.py defines it."""
    batch, groups, parts, clusters, width = centroids.shape
    count, tables = codes.shape[2], None
    out = q.new_empty((batch, groups, count), dtype=torch.float32)
    if isinstance(codes, Ragged) and isinstance(centroids, Ragged):
        tables = torch.stack([centroids.table[:, 0], codes.table[:, 0], centroids.counts, codes.counts], 1)
        given = centroids.first, codes.first
    else:
        assert not isinstance(codes, Ragged)
        assert not isinstance(centroids, Ragged)
        given = centroids.contiguous(), codes.contiguous()
    if count:
        _library.pq_weights(
            q=q.contiguous(), centroids=given[0], codes=given[1], tables=tables, out=out,
            code_bytes=codes.dtype.itemsize, pairs=batch * groups, groups=groups, heads=q.shape[1] // groups,
            parts=parts, clusters=clusters, width=width, count=count, scale=scale,
        )  # fmt: skip
    return Ragged.filled_up(out, codes.sizes) if isinstance(codes, Ragged) else out


def pq_weights_refuses(q: Tensor, centroids: Tensor | Ragged, codes: Tensor | Ragged, scale: float) -> str | None:
    if isinstance(codes, Ragged) != isinstance(centroids, Ragged):
        return "takes centroids of each sequence beside codes of each"
    if isinstance(codes, Ragged) and isinstance(centroids, Ragged) and not (codes.dense and centroids.dense):
        return "needs centroids and codes without gaps"
    if q.is_cuda or q.dtype not in (torch.float32, torch.bfloat16) or centroids.dtype != q.dtype:
        return f"takes float32 or bfloat16 on the CPU, got {q.dtype} and {centroids.dtype} on {q.device}"
    if codes.dtype not in (torch.uint8, torch.int32):
        return f"takes codes of uint8 or int32, got {codes.dtype}"
    if q.shape[1] > 16 * centroids.shape[1]:
        return f"takes up to 16 query heads per KV head, got {q.shape[1] // centroids.shape[1]}"
    return None
