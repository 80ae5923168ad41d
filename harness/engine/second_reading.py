"""Lets the model read the prompt of a cache again before its seal, for methods with `Repeat`
(methods/abilities/repeat.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.engine.cache import KVCache
from harness.engine.cache import Run as StateRun
from methods.abilities.repeat import Piece, attend_again
from methods.base import AttnInput

Run = Callable[[Tensor, KVCache], object]  # a forward of token ids [B T]


class SecondReading:
    """Remember the tokens of the first prompt of a cache, and have the model read them again when
    the prompt is complete."""

    def __init__(self, read: Callable[[Run, KVCache, Tensor], None], run: Run) -> None:
        """`read(run, cache, prompt)` feeds what is to be read, by `run`, a forward of the model."""
        self.read, self.run = read, run
        self._prompt: list[Tensor] = []  # [B T] each

    def note(self, ids: Tensor) -> None:
        """Remember token ids [B T] that are fed next."""
        self._prompt.append(ids)

    def __call__(self, cache: KVCache) -> None:
        """Let the model read the prompt of `cache` again, if all of its tokens were shown."""
        if 0 < sum(part.shape[1] for part in self._prompt) == cache.num_tokens:
            self.read(self.run, cache, torch.cat(self._prompt, 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> SecondReading:
        copied = SecondReading(self.read, self.run)
        copied._prompt = list(self._prompt)
        return copied


class Repeating(KVCache):
    """Stand for a cache in a forward that repeats a piece of its prompt: layers attend to what they
    hold and store nothing, and no token is counted."""

    def __init__(self, cache: KVCache, piece: Piece) -> None:
        vars(self).update(vars(cache))
        self.piece, self.before_seal = piece, None
        # the repetition follows the prompt, and is then forgotten
        self.states = None if cache.states is None else cache.states.copy()

    def attend(self, layer: int, x: AttnInput) -> Tensor:
        return attend_again(self.layers[layer], x, self.piece)

    def lend(self, layer: int, x: AttnInput) -> Tensor:
        return attend_again(self.layers[layer], x, None)

    def advance_state(self, layer: int, run: StateRun, hidden: Tensor) -> Tensor:
        assert self.states is not None
        return self.states.advance(layer, run, hidden, self.num_tokens)

    def text_lengths(self, arriving: int) -> list[int]:
        return super().text_lengths(0)
