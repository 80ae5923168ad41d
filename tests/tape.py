"""Steps that are captured on the CPU, counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from harness.engine.graph import CpuGraphs
from tests.fake_cuda import StreamedGraph


class Tape(CpuGraphs):
    def __init__(self) -> None:
        self.captured = 0
        self.dropped = 0

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        graph = StreamedGraph()
        with graph.capturing():
            result = step()
        self.captured += 1
        return graph.replay, result

    def drop(self, replay: Callable[[], Any]) -> None:
        super().drop(replay)
        self.dropped += 1

    def own_bytes(self, replay: Callable[[], Any]) -> int:
        return 0
