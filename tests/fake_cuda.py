"""torch.cuda's graphs on a CPU: captures are tapes, and pools of memory fail where torch's do.

A capture that multiplies leaves a block in its pool, as the workspace of a cuBLAS handle does. Torch counts the
graphs of a pool; once the last has gone, a capture that opens the pool again while blocks lie in it fails an assertion
(pytorch#189126).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from kernels.cpu.graph import CpuGraph


class Pool:
    def __init__(self) -> None:
        self.graphs = 0  # alive
        self.blocks = 0
        self.opened = False


class Graph:
    """As torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self._graph, self._pool = CpuGraph(), None

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"  # threads of a history store go on
        if pool.opened and not pool.graphs and pool.blocks:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        pool.opened, self._pool = True, pool
        pool.graphs += 1
        self._capturing = self._graph.capturing()
        self._capturing.__enter__()

    def capture_end(self) -> None:
        assert self._pool is not None
        self._capturing.__exit__(None, None, None)
        products = [call for call in self._graph.calls if "mm" in str(getattr(call, "func", ""))]
        self._pool.blocks += bool(products)  # one made a workspace

    def replay(self) -> None:
        assert self._pool is not None, "a graph that was reset is replayed"
        self._graph.replay()

    def reset(self) -> None:
        if self._pool is not None:
            self._pool.graphs -= 1
        self._pool = None

    __del__ = reset


@contextmanager
def installed() -> Iterator[None]:
    """In place of torch.cuda's, for what harness/engine/graph.py asks of it."""
    stands_in: dict[str, Any] = {
        "device": lambda device: nullcontext(),
        "graph_pool_handle": Pool,
        "CUDAGraph": Graph,
        "Stream": object,
        "stream": lambda stream: nullcontext(),
        "current_stream": object,
        "set_stream": lambda stream: None,
        "synchronize": lambda: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, fake in stands_in.items():
            patch.setattr(torch.cuda, name, fake)
        yield
