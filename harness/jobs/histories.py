"""What a run asks of whoever keeps the caches of its conversations between their turns.

CachedAttention (harness/cachedattention/) keeps them. It is found by its name, as methods and tasks are, so nothing
here depends on how it works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from harness.config.settings import Settings
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.models.base import LoadedModel

# the module whose `opened` and `in_memory` make `Histories`
KEEPER = "harness.cachedattention.turns.opening"


class Saved(Protocol):
    """The result of saving a turn's cache."""

    @property
    def save_s(self) -> float:
        """The seconds that the caller waited."""


class Found(Protocol):
    """The cache with which a turn begins."""

    @property
    def cache(self) -> KVCache:
        """The cache, with as much of the text as was kept."""

    @property
    def outgrown(self) -> bool:
        """True if the history was there, but the model rotates the longer text otherwise."""


class Talk(Protocol):
    """A conversation, turn by turn: `ask`, then `begin` with a filled cache or `resume` and `compute`, decode,
    `answered`, `save`. An example of one turn is one, too."""

    text: list[int]  # of user and model so far
    facts: dict[str, Any]  # what a record holds of the turn, by key; complete after `await_saved`

    @property
    def over(self) -> bool:
        """True if the turn that was asked last is the last one."""

    @property
    def found(self) -> Found:
        """The cache of this turn."""

    @property
    def unread(self) -> list[int]:
        """The tokens at the end of the text that the cache does not hold yet."""

    def ask(self, ids: Sequence[int], new_tokens: int = 0) -> None:
        """Begin the next turn with the prompt `ids` and an answer of at most `new_tokens`."""

    def begin(self, cache: KVCache) -> None:
        """Begin the turn with a cache that the caller has filled."""

    def resume(self) -> None:
        """Begin the turn with what was kept of the text."""

    def compute(self, prefill: Callable[[KVCache, Sequence[int]], Tensor]) -> Tensor | None:
        """Prefill what the cache lacks; return the logits of the last token [1 V], None if it is yet to be fed."""

    def answered(self, tokens: Sequence[int], stop: str) -> None:
        """Add the answer to the text."""

    def save(self) -> Saved:
        """End the turn: keep its cache for the next one, if there is one."""

    def await_saved(self) -> None:
        """Wait until the turn before is kept, which completes its facts."""


class Histories(Protocol):
    """The caches of a run's conversations between their turns."""

    def talk(self, session: str, capacity: int, turns: int, *, by_token: bool) -> Talk:
        """Begin the conversation `session` of `turns` turns, with `capacity` tokens at most. `by_token`: what a later
        turn adds is not prefilled but fed token by token (protocol=context)."""

    def expect(self, size: int) -> None:
        """Make room for conversations whose keys and values take `size` bytes together."""

    def forget(self, session: str) -> None:
        """Drop what is kept of a conversation that is over."""


def opened(
    settings: Settings, attachment: Attachment, loaded: LoadedModel, run: str
) -> AbstractContextManager[Histories]:
    """Return the histories of the run whose folder is called `run`, to be opened and closed."""
    return import_module(KEEPER).opened(settings, attachment, loaded, run)


def in_memory(settings: Settings, attachment: Attachment) -> Histories:
    """Return histories that need no store, for a warm-up."""
    return import_module(KEEPER).in_memory(settings, attachment)
