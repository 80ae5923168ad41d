"""Scores of product-quantised keys, compiled: pq.cpp."""

from __future__ import annotations

from ctypes import c_float, c_void_p
from struct import pack

import torch
from torch import Tensor

from kernels.cpu.library import load

_library = load("pq")
_library.pq_scores.argtypes = [c_void_p]
_library.pq_weights.argtypes = [c_void_p, c_float]


def pq_scores(q: Tensor, centroids: Tensor, codes: Tensor) -> Tensor:
    """As in kernels/reference.py."""
    batch, groups = centroids.shape[:2]
    out = q.new_empty((batch, groups, q.shape[1] // groups, codes.shape[2]), dtype=torch.float32)
    q, centroids, codes = q.contiguous(), centroids.contiguous(), codes.contiguous()
    _library.pq_scores(_numbers(q, centroids, codes, out))
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
        _library.pq_weights(_numbers(q, centroids, codes, out), scale)
    return out


def pq_weights_refuses(q: Tensor, centroids: Tensor, codes: Tensor, scale: float) -> str | None:
    return pq_scores_refuses(q, centroids, codes)


def _numbers(q: Tensor, centroids: Tensor, codes: Tensor, out: Tensor) -> bytes:
    batch, groups, parts, clusters, width = centroids.shape
    addresses = (x.data_ptr() for x in (q, centroids, codes, out))
    sizes = (batch * groups, q.shape[1] // groups, parts, clusters, width, codes.shape[2])
    return pack("12q", *addresses, q.element_size() == 2, codes.element_size(), *sizes)
