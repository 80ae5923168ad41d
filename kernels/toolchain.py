"""Finds what Triton needs beside a GPU: a C compiler and Python's headers, with which it builds the
launcher of a kernel. Clocks the seconds in which kernels are compiled."""

from __future__ import annotations

import os
import shutil
import sysconfig
import threading
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

# `at`: when this thread began to compile a kernel, until the kernel is loaded
_began = threading.local()
_compiled: list[tuple[float, float]] | None = None  # when each kernel was ready, and its seconds


def clock_compiling(runtime: Any) -> None:
    """Note from now on, for each kernel, how long Triton takes from the first launch that needs it
    until it can run: to compile it, or to find it in its cache on disk, to build its launcher, and
    to load both. `runtime`: Triton's `knobs.runtime`, which holds the hooks for that."""
    global _compiled
    compiled: list[tuple[float, float]] = []
    _compiled, before = compiled, runtime.jit_cache_hook

    def begin(**kernel: Any) -> Any:
        _began.at = perf_counter()
        return None if before is None else before(**kernel)

    def end(*kernel: Any) -> None:
        began, _began.at = getattr(_began, "at", None), None
        if began is not None:
            compiled.append((now := perf_counter(), now - began))

    runtime.jit_cache_hook = begin
    runtime.kernel_load_end_hook.add(end)


def compiled_s(since: float) -> float | None:
    """Return the seconds that Triton took in this process to make kernels ready (`clock_compiling`)
    after `since`, a time of `perf_counter`; None where it makes none."""
    return (
        None if _compiled is None else sum(seconds for ended, seconds in _compiled if ended > since)
    )


@cache
def unfit() -> str | None:
    """Return why Triton cannot build the launcher of a kernel on this machine, or None."""
    if compiler() is None:
        return "there is no C compiler: install gcc or clang, or name one in CC"
    if not headers().is_file():
        return f"Python's headers are missing ({headers()}): install python3-dev, or the like"
    return None


def compiler() -> str | None:
    """Return the path of the C compiler that Triton takes: CC if it is set, else gcc, else clang;
    None if there is none."""
    return shutil.which(os.environ.get("CC") or "gcc") or (
        None if os.environ.get("CC") else shutil.which("clang")
    )


def headers() -> Path:
    """Return the path where Python.h should be, as Triton looks for it."""
    scheme = sysconfig.get_default_scheme()
    return (
        Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
        / "Python.h"
    )
