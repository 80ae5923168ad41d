"""A press of a user's own, named by its import path: keeps what stands at even places, and as many tokens as asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.bridges.kvpress.package import package

ScorerPress: Any = package().ScorerPress


@dataclass
class MoodyPress(ScorerPress):
    """Does in layer 1 what `mood` says: raise, or give scores that are NaN."""

    mood: ClassVar[str] = ""

    def score(self, module: Any, hidden: Any, keys: Tensor, *args: Any) -> Tensor:
        mood = self.mood if module.layer_idx == 1 else ""
        if mood == "raise":
            raise RuntimeError("boom")
        return keys.norm(dim=-1) * (float("nan") if mood == "nan" else 1)


@dataclass
class InfinitePress(ScorerPress):
    """Leaves keys that are not finite."""

    def score(self, module: Any, hidden: Any, keys: Tensor, *args: Any) -> Tensor:
        return keys.norm(dim=-1)

    def compress(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().compress(*arguments)
        return keys * float("inf"), values


@dataclass
class EvenPress(ScorerPress):
    def score(self, module: Any, hidden: Any, keys: Tensor, *args: Any) -> Tensor:
        return (1 - torch.arange(keys.shape[2]) % 2).float().expand(keys.shape[:3])
