"""Remembers the text of a cache, for models that rotate a text by its length (rotation.py)."""

from __future__ import annotations

import torch
from torch import Tensor


class FedText:
    """Hold the pieces of a text that are known, and how its tokens were rotated so far."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []  # [B T] each
        self.prompt_tokens = 0  # length of the whole text up to the answer
        # stages of rotation of the tokens so far (`TextRotary.stage`)
        self.stages: set[int] = set()

    @property
    def known(self) -> int:
        """Return how many tokens of the text are known."""
        return sum(part.shape[1] for part in self.parts)

    def set(self, ids: Tensor) -> None:
        """Set the whole text up to the answer, ids [B S]."""
        self.prompt_tokens, self.parts = ids.shape[1], [ids]

    def take(self, other: FedText) -> None:
        """Take over the text up to the answer of another cache, in whose place this one's comes."""
        self.prompt_tokens, self.parts = other.prompt_tokens, list(other.parts)

    def followed_by(self, tokens: int, ids: Tensor) -> Tensor:
        """Return the first `tokens` tokens and then ids [B T], the whole text [B S]."""
        return torch.cat([torch.cat(self.parts, 1)[:, :tokens], ids.to(self.parts[0].device)], 1)
