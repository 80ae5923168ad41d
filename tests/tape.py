"""Counts the steps that the stand-in for CUDA graphs captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.fake_cuda import StreamedGraph


class Tape:
    """Stands where CUDA graphs do (harness/engine/graph.py)."""

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
        self.dropped += 1
