"""Rebuilds low-rank keys, compiled (rebuild.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.ffi.bindings import Function, Struct, elements, int64s, integer
from kernels.cpu.ffi.library import load


class RebuildKeys(Struct):
    """Describes a call that rebuilds and rotates keys. A position is a row of u, of cos and of sin."""

    u = elements(strides="batch row")
    basis = elements("batch * groups * rank * dim")
    cos = elements(strides="row")
    sin = elements(strides="row")
    positions = int64s("batch * groups * count")
    out = elements("batch * groups * count * dim", written=True)
    batch = groups = count = rank = dim = integer()


_library = load("rebuild", Function("rebuild_keys", RebuildKeys))


def rebuild_keys(u: Tensor, basis: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rebuild keys from their low-rank factors and rotate them, as kernels/reference.py defines it."""
    batch, groups, rank, dim = basis.shape
    basis, positions = basis.contiguous(), positions.long().contiguous()
    out = u.new_empty((batch, groups, positions.shape[2], dim))
    if out.numel():
        _library.rebuild_keys(
            u=u, basis=basis, cos=cos, sin=sin, positions=positions, out=out, batch=batch, groups=groups,
            count=positions.shape[2], rank=rank, dim=dim,
        )  # fmt: skip
    return out


def rebuild_keys_refuses(u: Tensor, basis: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    if u.is_cuda or u.dtype not in (torch.float32, torch.bfloat16) or basis.dtype != u.dtype:
        return f"takes float32 or bfloat16 on the CPU, got {u.dtype} and {basis.dtype} on {u.device}"
    if cos.dtype != u.dtype or sin.dtype != u.dtype:
        return f"takes one dtype, got {u.dtype} and angles of {cos.dtype}"
    dim = basis.shape[3]
    if dim % 32 or cos.shape[1] != dim:
        return f"turns whole heads of a multiple of 32, got {cos.shape[1]} channels of {dim}"
    if u.dtype == torch.bfloat16 and (u.shape[2] % 2 or u.stride(0) % 2 or u.stride(1) % 2):
        return f"takes an even rank in bfloat16, got {u.shape[2]}"
    if u.stride(2) != 1 or cos.stride(1) != 1 or sin.stride() != cos.stride():
        return "needs the entries of a row side by side"
    return None
