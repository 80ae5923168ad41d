"""Reads memory and does nothing else, compiled (bandwidth.cpp)."""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.ffi.bindings import Function, Struct, anything, integer
from kernels.cpu.ffi.library import load


class ReadAll(Struct):
    x = anything()
    bytes = integer()


_library = load("bandwidth", Function("read_all", ReadAll, returns="int64_t"))


def read(x: Tensor) -> int:
    """Read all of x, which must be contiguous. The returned sum keeps the compiler from omitting
    reads."""
    return int(_library.read_all(x=x, bytes=x.nbytes))
