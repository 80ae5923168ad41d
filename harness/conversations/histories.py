"""Where a conversation's cache is between two turns: nowhere, on the device, or in a store (stored.py).

    found = histories.resume("alice", text_so_far, capacity)
    logits = engine.prefill(found.cache, prompt[:, found.reused :])
    ...                                                             # seal, decode
    histories.save("alice", fed, found.cache)

The last token of an answer has not been fed, so it has no keys and values: `fed` ends before it, and the next turn's
prompt begins with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from harness.engine.cache import KVCache
from harness.engine.wait import wait_for
from harness.history.placement import DEVICE

Start = Callable[[int], KVCache]  # tokens of all turns, prompts and answers, at most -> a fresh cache


@dataclass(frozen=True, slots=True)
class Resumed:
    """A cache that holds the first `reused` tokens of those asked for, found in `tier`; None on a miss."""

    cache: KVCache
    reused: int = 0
    tier: str | None = None
    load_s: float = 0.0  # until the cache was there, a fresh one too


class Histories(ABC):
    """One per run: it knows how caches of its engine are started."""

    def __init__(self, start: Start) -> None:
        self.start = start

    def resume(self, session: str, tokens: Sequence[int], capacity: int) -> Resumed:
        """A cache for the next turn, with as many of `tokens` as are to be had.

        `tokens`: the text so far, without what must be fed in any case, as a prompt's last token for its logits. A
        cache that `save` was given alive comes back as it is: `open_turn` before a prefill.
        """
        began = perf_counter()
        cache, reused, tier = self._find(session, tokens, capacity)
        wait_for(cache.state.request.device)
        return Resumed(cache, reused, tier, perf_counter() - began)

    @abstractmethod
    def _find(self, session: str, tokens: Sequence[int], capacity: int) -> tuple[KVCache, int, str | None]:
        """-> cache, tokens reused, tier"""

    def save(self, session: str, tokens: Sequence[int], cache: KVCache) -> float:
        """The turn has ended. `tokens`: all that was fed to `cache`, which belongs to this object now. -> seconds"""
        if len(tokens) != cache.num_tokens:
            raise ValueError(
                f"The cache holds {cache.num_tokens} tokens and {len(tokens)} were named: name those that were fed, "
                "without an answer's last."
            )
        began = perf_counter()
        self._keep(session, tokens, cache)
        return perf_counter() - began

    @abstractmethod
    def _keep(self, session: str, tokens: Sequence[int], cache: KVCache) -> None: ...

    def forget(self, session: str) -> None:  # noqa: B027 (a store has its own rules)
        """The conversation is over."""

    def enqueue(self, session: str) -> None:  # noqa: B027
        """A turn of the session waits, behind those that wait already."""

    def dequeue(self, session: str) -> None:  # noqa: B027
        """Its turn starts, or is given up."""

    def prefetch(self) -> None:  # noqa: B027
        """Move the sessions of the turns that wait closer to the device."""

    def close(self) -> None:  # noqa: B027
        """Call it once, at the end of the run."""


class Recompute(Histories):
    """Nothing is kept: every turn computes the whole text again."""

    def _find(self, session: str, tokens: Sequence[int], capacity: int) -> tuple[KVCache, int, str | None]:
        return self.start(capacity), 0, None

    def _keep(self, session: str, tokens: Sequence[int], cache: KVCache) -> None:
        pass


class DevicePrefix(Histories):
    """Caches stay alive on the device, as many as there are conversations. One that holds anything but the beginning
    of what is asked for is of no use, and is let go."""

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._alive: dict[str, tuple[list[int], KVCache]] = {}

    def _find(self, session: str, tokens: Sequence[int], capacity: int) -> tuple[KVCache, int, str | None]:
        held, cache = self._alive.pop(session, ([], None))
        if cache is None or list(tokens[: len(held)]) != held:
            return self.start(capacity), 0, None
        if cache.capacity < capacity:
            small, cache = cache, self.start(capacity)
            cache.refill(small.contents())
        return cache, len(held), DEVICE

    def _keep(self, session: str, tokens: Sequence[int], cache: KVCache) -> None:
        self._alive[session] = list(tokens), cache

    def forget(self, session: str) -> None:
        self._alive.pop(session, None)

    def close(self) -> None:
        self._alive.clear()
