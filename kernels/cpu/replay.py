"""Makes compiled calls again, with no Python between them (replay.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.ffi.bindings import Function, Struct, anything, int64s, integer
from kernels.cpu.ffi.library import load

MOST_COPIED = 1 << 12  # entries: beyond that torch's copy is faster, which threads share


class CopyEntries(Struct):
    """Describes a call that copies a small tensor, whatever its strides, into a contiguous one of the same dtype."""

    x = anything()
    out = anything("size0 * size1 * size2 * size3", written=True)
    size0 = size1 = size2 = size3 = integer()
    step0 = step1 = step2 = step3 = integer(0)  # entries from one to the next
    width = integer()  # bytes of an entry


class RunCalls(Struct):
    """Describes calls that follow one another."""

    calls = int64s("count * 3")  # of each: where its function lies, and its structs, 0 for none
    count = integer()


_library = load("replay", Function("copy_entries", CopyEntries), Function("run_calls", RunCalls))


def copies(x: Tensor, out: Tensor) -> bool:
    """Say whether `copy` can copy x into `out`."""
    plain = x.dtype is out.dtype and x.itemsize in (1, 2, 4, 8) and not (x.is_conj() or x.is_neg())
    return plain and x.dim() <= 4 and 0 < x.numel() <= MOST_COPIED and out.is_contiguous() and x.shape == out.shape


def copy(x: Tensor, out: Tensor) -> None:
    """Copy x into `out`, where `copies` says that it can be."""
    lacking = 4 - x.dim()
    sizes = dict(zip(("size0", "size1", "size2", "size3"), (*(1,) * lacking, *x.shape), strict=True))
    steps = dict(zip(("step0", "step1", "step2", "step3"), (*(0,) * lacking, *x.stride()), strict=True))
    _library.copy_entries(x=x, out=out, width=x.itemsize, **sizes, **steps)


def joined(calls: Sequence[tuple[Any, tuple[bytes, ...]]]) -> Callable[[], None]:
    """Return what makes calls again, one after the other. `calls`: each function, as ctypes has it, and its structs."""
    packed = torch.frombuffer(bytearray().join(part for _, structs in calls for part in structs), dtype=torch.int64)
    at, rows = packed.data_ptr(), []
    for function, structs in calls:
        row = [ctypes.cast(function, ctypes.c_void_p).value or 0]
        for part in structs:
            row.append(at)
            at += len(part)
        rows.append(row + [0] * (3 - len(row)))
    return partial(_run, torch.tensor(rows), packed)


def _run(calls: Tensor, packed: Tensor) -> None:
    """Make calls that refer to what is `packed`."""
    _library.run_calls(calls=calls, count=len(calls))
