"""What may look on at a generation, as fidelity.py does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from methods.base import AttnInput, KVLayer


class Watch(Protocol):
    """Looks on at one generation, without a part in it: every attention call behind its layer, every decode forward."""

    def prefill(self, layer: int, x: AttnInput) -> None:
        """A prompt chunk has been attended to."""

    def decode(self, layer: KVLayer, x: AttnInput, out: Tensor) -> None:
        """`layer` has answered `out` [B H 1 D] to `x`."""

    def note(self, fed: Tensor, logits: Tensor, text: int = 0) -> None:
        """A decode forward took `fed` [B 1] and gave `logits` [B V]. `text`: by which length of
        the text the model rotated (`TextRotary.stage`)."""

    def report(self, model: nn.Module, place: int, tokens: Sequence[int], compare: bool) -> dict[str, Any] | None:
        """What is recorded for sequence `place`, which answered `tokens`; None without a measured step. `compare`:
        hold it against Full on the same text."""
