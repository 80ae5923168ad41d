"""Copies rows of each KV head, compiled (copy.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.ffi.bindings import Function, Struct, anything, int64s, integer
from kernels.cpu.ffi.library import load
from kernels.ragged import Ragged, counts_of, filled, first_of, table_of, with_sizes


class CopyRows(Struct):
    """Describe a call of the compiled function that copies rows of `width` bytes from x to a
    contiguous block, or from the block into x. A pair is one KV head of one sequence."""

    x = anything(strides="batch group row", written=True)  # [B G S D]
    # of `Ragged`, instead of the address and the strides above
    table = int64s("pairs // groups * 3", optional=True)
    rows = int64s("pairs * count")
    # how many rows of each sequence are there; None: all
    counts = int64s("pairs // groups", optional=True)
    block = anything("pairs * count * channels", written=True)
    pairs = groups = count = channels = width = integer()


class CopyTiers(Struct):
    """Describe a call of the compiled function that copies rows of `width` bytes out of two
    tensors: from `held` where `slots` says so, else from `far`."""

    far = anything(strides="batch group row")  # [B G S D]
    # of `Ragged`, instead of its address and strides
    table = int64s("pairs // groups * 3", optional=True)
    held = anything(strides="batch group row")  # [B G C D]
    rows = int64s("pairs * count")
    slots = int64s("pairs * count")  # 0 or more: the row is there in `held`
    block = anything("pairs * count * channels", written=True)
    pairs = groups = count = channels = width = integer()


_library = load(
    "copy",
    Function("gather_rows", CopyRows),
    Function("put_rows", CopyRows),
    Function("gather_tiers", CopyTiers),
)


def gather_rows(
    x: Tensor | Ragged, rows: Tensor | Ragged, out: Tensor | None = None
) -> Tensor | Ragged:
    """Copy rows (tokens) of each KV head out of x [B G S D] at the indices rows [B G K], as
    kernels/reference.py defines it. -> [B G K D]"""
    chosen = filled(rows).long().contiguous()
    if out is None:
        out = torch.empty((*chosen.shape, first_of(x).shape[3]), dtype=x.dtype)
    if out.numel():
        counts, sizes = counts_of(rows, out.device), _sizes(out, chosen)
        _library.gather_rows(
            x=first_of(x), table=table_of(x), rows=chosen, counts=counts, block=out, **sizes
        )
    return with_sizes(out, rows)


def gather_rows_refuses(x, rows, out=None):
    return _unfit(first_of(x))


def _unfit(x: Tensor) -> str | None:
    if x.is_cuda:
        return f"takes tensors on the CPU, got {x.device}"
    return None if x.stride(3) == 1 else "needs the channels of a row side by side"


def gather_tiers(
    far: Tensor | Ragged, rows: Tensor | Ragged, held: Tensor | None, slots: Tensor | None
) -> Tensor | Ragged:
    """Copy rows of each KV head out of `held` [B G C D], where `slots` [B G K] says so, else out of
    `far` [B G S D], as kernels/reference.py defines it. -> [B G K D]"""
    if held is None or slots is None:
        return gather_rows(far, rows)
    chosen = filled(rows).long().contiguous()
    at = slots.long().contiguous()
    out = torch.empty((*chosen.shape, first_of(far).shape[3]), dtype=far.dtype)
    if out.numel():
        sizes = _sizes(out, chosen)
        _library.gather_tiers(
            far=first_of(far),
            table=table_of(far),
            held=held,
            rows=chosen,
            slots=at,
            block=out,
            **sizes,
        )
    return out


def gather_tiers_refuses(far, rows, held, slots):
    if filled(rows).is_cuda:
        return f"brings rows to the CPU, and they are for {rows.device}"
    return _unfit(first_of(far)) or (None if held is None else _unfit(held))


def put_rows(x: Tensor | Ragged, rows: Tensor, values: Tensor) -> None:
    rows, values = rows.long().contiguous(), values.contiguous()
    if values.numel():
        sizes = _sizes(values, rows)
        _library.put_rows(
            x=first_of(x), table=table_of(x), rows=rows, counts=None, block=values, **sizes
        )


def put_rows_refuses(x, rows, values):
    if values.dtype != x.dtype:
        return f"takes one dtype, got {x.dtype} and values of {values.dtype}"
    return _unfit(first_of(x))


def _sizes(block: Tensor, rows: Tensor) -> dict[str, int]:
    (batch, groups, count), channels = rows.shape, block.shape[3]
    width = channels * block.element_size()
    return {
        "pairs": batch * groups,
        "groups": groups,
        "count": count,
        "channels": channels,
        "width": width,
    }
