"""Picks the next token: the most likely one, or one drawn with a seed of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Sampler(Protocol):
    """Pick the next token of each sequence."""

    def pick(self, logits: Tensor) -> Tensor:
        """Return the token ids [B] picked from logits [B V]."""


class Greedy:
    """Pick the most likely token."""

    def pick(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)


@dataclass(slots=True)
class Sampled:
    """Draw a token: divide by the temperature, keep the `top_k` best (0: all), then the smallest
    set of probability `top_p`."""

    temperature: float
    top_k: int
    top_p: float
    generator: torch.Generator

    def pick(self, logits: Tensor) -> Tensor:
        logits = logits.float() / self.temperature
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        # a draw from NaN would break a GPU; RunningSequence.finish reports it
        chances = logits.softmax(-1).nan_to_num(nan=1.0)
        chances, order = chances.sort(-1, descending=True)
        before = chances.cumsum(-1) - chances
        chances = chances.masked_fill(before >= self.top_p, 0.0)
        drawn = torch.multinomial(chances, 1, generator=self.generator)
        return order.gather(-1, drawn).squeeze(-1)


@dataclass(slots=True)
class MinLength:
    """Pick tokens by `sampler`, but bar some of them at the beginning: among the first `count`
    tokens of sequence i, none of the ids `barred[i]` is picked.

    Tokens that would end the answer thus have no probability (generate's `min_length`), which
    differs from picking an end and going on after it."""

    sampler: Sampler
    barred: Sequence[Sequence[int]]
    count: int
    picked: int = 0

    def pick(self, logits: Tensor) -> Tensor:
        self.picked += 1
        if self.picked <= self.count:
            logits = logits.clone()
            for row, ids in zip(logits, self.barred, strict=True):
                row[list(ids)] = float("-inf")
        return self.sampler.pick(logits)
