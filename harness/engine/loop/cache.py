"""Defines the cache for a loop that does not set the phase itself, such as `model.generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.engine.cache import KVCache
from methods.base import CacheState, KVLayer

STEP = 1024  # tokens by which a cache grows at least, so that few steps copy its rows


@dataclass
class LoopUsage:
    """Record what a cache was used for; the record outlives the cache."""

    tokens: int = 0
    sealed: bool = False  # in some turn
    fallback: str | None = None  # what the method did instead of its rule in some turn, and why


class LoopCache(KVCache):
    """Infer the phase from the number of tokens in a forward.

    The first forward is prompt. After it, a forward of several tokens opens a turn or continues it,
    and the first forward of one token seals it. Call `open_turn` before a forward of one token that
    is prompt: a turn of one token, or the last token of a prefill in chunks."""

    may_grow: Callable[[int, int], None] | None = None  # raises `ValueError` for a larger capacity; None: never grows
    _prompt_next = False  # the next forward is prompt, whatever its length

    def __init__(self, layers: Sequence[KVLayer], state: CacheState) -> None:
        super().__init__(layers, state)
        self.usage = LoopUsage()

    @property
    def prompt_next(self) -> bool:
        """Return whether the next forward is prompt, whatever its length."""
        return self._prompt_next

    def open_turn(self) -> None:
        super().open_turn()
        self._prompt_next = True

    def seal(self) -> None:
        super().seal()
        self.usage.sealed, self._prompt_next = True, False
        self.usage.fallback = self.fallback or self.usage.fallback

    def end(self) -> None:
        super().end()
        self.usage.tokens = self.num_tokens

    def make_room(self, tokens: int) -> bool:
        """Grow if `tokens` more do not fit and the cache may grow. Return whether it has grown,
        which moves all its rows."""
        needed = self.num_tokens + tokens
        if self.may_grow is None or needed <= self.capacity:
            return False
        more = max(needed - self.capacity, STEP)
        self.may_grow(self.capacity, self.capacity + more)
        self.grow(more)
        return True

    def _check_room(self, sequences: int, tokens: int) -> None:
        self.make_room(tokens)
        super()._check_room(sequences, tokens)

    def _arrive(self, tokens: int) -> None:
        super()._arrive(tokens)
        if tokens > 1 or self._prompt_next or not self.num_tokens:
            self.sealed = self._prompt_next = False
        elif not self.sealed:
            self.seal()
