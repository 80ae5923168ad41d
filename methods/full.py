"""Full: every token of the cache, read by every step. The baseline all others are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from methods.base import KVLayer, LayerSpec, Method, Request
from methods.layers import DenseLayer


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """No parameters. The store is preallocated, so a step copies nothing but its own token."""

    uses_budget: ClassVar[bool] = False

    def start(self, specs: Sequence[LayerSpec], request: Request) -> list[KVLayer]:
        return [DenseLayer(spec, request, self) for spec in specs]
