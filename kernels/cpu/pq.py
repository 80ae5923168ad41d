"""Weighs product-quantised keys, compiled (pq.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.ffi.bindings import Function, Struct, anything, elements, floats, integer, real
from kernels.cpu.ffi.library import load


class PQWeights(Struct):
    """Describes a call that weighs coded keys by their centroids' products with the queries."""

    q = elements("pairs * heads * parts * width")
    centroids = elements("pairs * parts * clusters * width")
    codes = anything("pairs * count * parts")  # of `code_bytes` bytes each
    out = floats("pairs * count", written=True)
    code_bytes = pairs = heads = parts = clusters = width = count = integer()
    scale = real()


_library = load("pq", Function("pq_weights", PQWeights))


def pq_weights(q: Tensor, centroids: Tensor, codes: Tensor, scale: float) -> Tensor:
    """Compute the softmax weights of coded keys, summed over a group, as kernels/reference.py defines it."""
    batch, groups, parts, clusters, width = centroids.shape
    count = codes.shape[2]
    out = q.new_empty((batch, groups, count), dtype=torch.float32)
    if count:
        _library.pq_weights(
            q=q.contiguous(), centroids=centroids.contiguous(), codes=codes.contiguous(), out=out,
            code_bytes=codes.element_size(), pairs=batch * groups, heads=q.shape[1] // groups, parts=parts,
            clusters=clusters, width=width, count=count, scale=scale,
        )  # fmt: skip
    return out


def pq_weights_refuses(q: Tensor, centroids: Tensor, codes: Tensor, scale: float) -> str | None:
    if q.is_cuda or q.dtype not in (torch.float32, torch.bfloat16) or centroids.dtype != q.dtype:
        return f"takes float32 or bfloat16 on the CPU, got {q.dtype} and {centroids.dtype} on {q.device}"
    if codes.dtype not in (torch.uint8, torch.int32):
        return f"takes codes of uint8 or int32, got {codes.dtype}"
    if q.shape[1] > 16 * centroids.shape[1]:
        return f"takes up to 16 query heads per KV head, got {q.shape[1] // centroids.shape[1]}"
    return None
