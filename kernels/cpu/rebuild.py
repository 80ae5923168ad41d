"""Rebuilds low-rank keys, compiled (rebuild.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.ffi.bindings import Function, Struct, elements, int64s, integer
from kernels.cpu.ffi.library import load
from kernels.ragged import Ragged, counts_of, filled, first_of, table_of, with_sizes


class RebuildKeys(Struct):
    """Describe a call of the compiled function that rebuilds keys from low-rank factors and rotates
    them. A position is a row of u, of cos and of sin."""

    u = elements(strides="batch row")
    basis = elements()  # [G r D] of each sequence
    cos = elements(strides="row")
    sin = elements(strides="row")
    # of `Ragged`, in their place
    u_table = basis_table = cos_table = sin_table = int64s("batch * 3", optional=True)
    # below zero: none, and its place in `out` stays as it is
    chunks = int64s("batch * groups * count")
    # how many chunks of each sequence are there; None: all
    counts = int64s("batch", optional=True)
    out = elements("batch * groups * count * size * dim", written=True)
    batch = groups = count = rank = dim = integer()
    size = integer()  # positions of a chunk


_library = load(
    "rebuild", Function("rebuild_keys", RebuildKeys), Function("is_on_tiles", returns="int64_t")
)


def rebuild_keys(
    u: Tensor | Ragged, basis: Tensor | Ragged, chunks: Tensor | Ragged, size: int, cos: Tensor | Ragged,
    sin: Tensor | Ragged, out: Tensor | None = None,
) -> Tensor | Ragged:  # fmt: skip
    """Rebuild the keys of chunks [B G K] of `size` tokens, [B G K * size D], from their low-rank
    factors u [B S r] and basis [B G r D], and rotate them by cos and sin, as kernels/reference.py
    defines it."""
    groups, rank, dim = first_of(basis).shape[1:]
    numbers = filled(chunks).long().contiguous()
    batch, _, count = numbers.shape
    sizes = chunks.sizes * size if isinstance(chunks, Ragged) else 0
    if out is None:
        out = numbers.new_empty((batch, groups, count * size, dim), dtype=u.dtype)
    if out.numel():
        _library.rebuild_keys(
            u=first_of(u), basis=first_of(basis).contiguous(), cos=_angles(cos), sin=_angles(sin), u_table=table_of(u),
            basis_table=table_of(basis), cos_table=table_of(cos), sin_table=table_of(sin), chunks=numbers,
            counts=counts_of(chunks, out.device), out=out, batch=batch, groups=groups, count=count, rank=rank, dim=dim,
            size=size,
        )  # fmt: skip
    return with_sizes(out, sizes)


def rebuild_keys_refuses(u, basis, chunks, size, cos, sin, out=None):
    factors = (u, basis, cos, sin)
    if len({isinstance(x, Ragged) for x in factors}) > 1 or (
        isinstance(chunks, Ragged) and not isinstance(u, Ragged)
    ):
        return "takes factors and angles of each sequence beside one another"
    if isinstance(basis, Ragged) and not basis.dense:
        return "needs the basis of a sequence without gaps"
    odd = isinstance(u, Ragged) and u.dtype == torch.bfloat16 and u.row_alignment % 4
    return (
        "takes an even rank in bfloat16"
        if odd
        else _unfit(first_of(u), first_of(basis), _angles(cos), _angles(sin))
    )


def _unfit(u: Tensor, basis: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    if u.is_cuda or u.dtype not in (torch.float32, torch.bfloat16) or basis.dtype != u.dtype:
        return (
            f"takes float32 or bfloat16 on the CPU, got {u.dtype} and {basis.dtype} on {u.device}"
        )
    if cos.dtype != u.dtype or sin.dtype != u.dtype:
        return f"takes one dtype, got {u.dtype} and angles of {cos.dtype}"
    dim = basis.shape[-1]
    if dim % 32 or cos.shape[-1] != dim:
        return f"turns whole heads of a multiple of 32, got {cos.shape[-1]} channels of {dim}"
    if u.dtype == torch.bfloat16 and (u.shape[2] % 2 or u.stride(0) % 2 or u.stride(1) % 2):
        return f"takes an even rank in bfloat16, got {u.shape[2]}"
    if u.stride(2) != 1 or cos.stride(-1) != 1 or sin.stride() != cos.stride():
        return "needs the entries of a row side by side"
    return None


def _angles(x: Tensor | Ragged) -> Tensor:
    """Return cos or sin as [P R], a row per position; for several sequences the first one's."""
    return first_of(x).flatten(0, -2)
