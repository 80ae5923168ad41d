"""Defines what observes a generation, as fidelity.py does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from methods.base import AttnInput, KVLayer


class Watch(Protocol):
    """Observe one generation without taking part: every attention call after its layer, and every
    decode forward."""

    def prefill(self, layer: int, x: AttnInput) -> None:
        """Note that layer `layer` has attended to a chunk of the prompt."""

    def decode(self, layer: KVLayer, x: AttnInput, out: Tensor) -> None:
        """Note that `layer` has answered `out` [B H 1 D] to `x`."""

    def note(self, fed: Tensor, logits: Tensor, text: int = 0) -> None:
        """Note that a decode forward took `fed` [B 1] and gave `logits` [B V]. `text`: the length
        of text by which the model rotated (`TextRotary.stage`)."""

    def report(self, model: nn.Module, place: int, tokens: Sequence[int], compare: bool) -> dict[str, Any] | None:
        """Return what is recorded for sequence `place`, which answered `tokens`; None if no step
        was measured. `compare`: compare it with Full on the same text."""
