"""Scores of product-quantised keys, compiled: pq.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.ffi.bindings import Function, Struct, anything, elements, floats, integer, real
from kernels.cpu.ffi.library import load


class PQScores(Struct):
    q = elements("pairs * heads * parts * width")
    centroids = elements("pairs * parts * clusters * width")
    codes = anything("pairs * count * parts")  # of `code_bytes`
    out = floats(written=True)  # [P g S], or their weights' sums [P S]
    code_bytes = pairs = heads = parts = clusters = width = count = integer()
    scale = real()  # of the weights


_library = load("pq", Function("pq_scores", PQScores), Function("pq_weights", PQScores))


def pq_scores(q: Tensor, centroids: Tensor, codes: Tensor) -> Tensor:
    """As in kernels/reference.py."""
    batch, groups = centroids.shape[:2]
    out = q.new_empty((batch, groups, q.shape[1] // groups, codes.shape[2]), dtype=torch.float32)
    q, centroids, codes = q.contiguous(), centroids.contiguous(), codes.contiguous()
    _library.pq_scores(q=q, centroids=centroids, codes=codes, out=out, scale=1, **_sizes(q, centroids, codes))
    return out


def pq_scores_refuses(q: Tensor, centroids: Tensor, codes: Tensor) -> str | None:
    if q.is_cuda or q.dtype not in (torch.float32, torch.bfloat16) or centroids.dtype != q.dtype:
        return f"takes float32 or bfloat16 on the CPU, got {q.dtype} and {centroids.dtype} on {q.device}"
    if codes.dtype not in (torch.uint8, torch.int32):
        return f"takes codes of uint8 or int32, got {codes.dtype}"
    if q.shape[1] > 16 * centroids.shape[1]:
        return f"takes up to 16 query heads per KV head, got {q.shape[1] // centroids.shape[1]}"
    return None


def pq_weights(q: Tensor, centroids: Tensor, codes: Tensor, scale: float) -> Tensor:
    out = q.new_empty((*centroids.shape[:2], codes.shape[2]), dtype=torch.float32)
    q, centroids, codes = q.contiguous(), centroids.contiguous(), codes.contiguous()
    if codes.shape[2]:
        _library.pq_weights(q=q, centroids=centroids, codes=codes, out=out, scale=scale, **_sizes(q, centroids, codes))
    return out


def pq_weights_refuses(q: Tensor, centroids: Tensor, codes: Tensor, scale: float) -> str | None:
    return pq_scores_refuses(q, centroids, codes)


def _sizes(q: Tensor, centroids: Tensor, codes: Tensor) -> dict[str, int]:
    batch, groups, parts, clusters, width = centroids.shape
    return {
        "code_bytes": codes.element_size(), "pairs": batch * groups, "heads": q.shape[1] // groups, "parts": parts,
        "clusters": clusters, "width": width, "count": codes.shape[2],
    }  # fmt: skip
