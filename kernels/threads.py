"""Says how many CPU threads a decode step uses: fewer while another process keeps one of the
cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from time import monotonic_ns

import torch


@contextmanager
def step_threads(device: torch.device) -> Iterator[None]:
    """Inside this block, limit torch's operations on a CPU to as many threads as the compiled
    kernels use (kernels/cpu/team.cpp): fewer while another process keeps a core busy. A parallel
    region ends with its last thread, and a thread that lost its core needs milliseconds to get it
    back."""
    if device.type != "cpu":
        yield
        return
    all_threads = torch.get_num_threads()
    threads = _team_size()(monotonic_ns())
    if threads >= all_threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(all_threads)


@cache
def _team_size() -> Callable[[int], int]:
    try:
        from kernels.cpu.ffi import library

        size: Callable[[int], int] = library.team().kv_team_size
    except ImportError:  # without a compiler torch's operations run alone, and nobody watches them
        return lambda now: torch.get_num_threads()
    return size
