"""Rows of each KV head copied, compiled: copy.cpp."""

from __future__ import annotations

from ctypes import c_void_p
from struct import pack

from torch import Tensor

from kernels.cpu.library import load

_library = load("copy")
_library.gather_rows.argtypes = [c_void_p]
_library.put_rows.argtypes = [c_void_p]


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """As in kernels/reference.py."""
    out = x.new_empty((*rows.shape, x.shape[3]))
    rows = rows.long().contiguous()
    _library.gather_rows(_numbers(x, rows, out))
    return out


def gather_rows_refuses(x: Tensor, rows: Tensor) -> str | None:
    if x.is_cuda:
        return f"takes tensors on the CPU, got {x.device}"
    return None if x.stride(3) == 1 else "needs the channels of a row side by side"


def put_rows(x: Tensor, rows: Tensor, values: Tensor) -> None:
    rows, values = rows.long().contiguous(), values.contiguous()
    _library.put_rows(_numbers(x, rows, values))


def put_rows_refuses(x: Tensor, rows: Tensor, values: Tensor) -> str | None:
    if values.dtype != x.dtype:
        return f"takes one dtype, got {x.dtype} and values of {values.dtype}"
    return gather_rows_refuses(x, rows)


def _numbers(x: Tensor, rows: Tensor, block: Tensor) -> bytes:
    addresses = (part.data_ptr() for part in (x, rows, block))
    batch, groups, count = rows.shape
    sizes = (batch * groups, groups, count, x.shape[3] * x.element_size())
    return pack("10q", *addresses, *sizes, *(x.element_size() * stride for stride in x.stride()[:3]))
