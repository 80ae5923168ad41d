"""Where a conversation's cache is between two turns: nowhere, on the device, or in a store (stored.py).

`Conversation` (conversation.py) calls `resume`, `compute`, `save_ahead` and `save` in each turn, in this
order, and `save_ahead` again while the answer grows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import ClassVar

from torch import Tensor

from harness.cachedattention.store.block import HistoryLost
from harness.cachedattention.store.history_load import HistoryLoad
from harness.cachedattention.store.upload import UploadToHost
from harness.cachedattention.turns.truncation import Rotation, truncated
from harness.engine.cache import KVCache
from harness.engine.wait import wait_for
from methods.tiers.tier import DEVICE

Prefill = Callable[[KVCache, Sequence[int]], Tensor]  # -> logits of the last token [1 V]
NewCache = Callable[[int], KVCache]  # tokens of all turns, prompts and answers, at most -> a fresh cache


@dataclass(frozen=True, slots=True)
class ResumedCache:
    """A cache that holds the first `reused` tokens of those asked for, found in `tier`; None on a miss.

    `load_s`: seconds that the turn has waited for it, a fresh one too; `hidden_s`: those in which its layers were on
    their way while it computed. Both are complete behind `compute`, and so is `lost`: why what was stored is not there,
    where computing it again gives something else. `outgrown`: it was there, and the longer text is rotated otherwise.
    """

    cache: KVCache
    reused: int = 0
    tier: str | None = None
    load_s: float = 0.0
    hidden_s: float = 0.0
    loading: HistoryLoad | None = None
    lost: str | None = None
    outgrown: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """A turn that was saved. `save_s`: seconds that the caller waited at its end, those of `save_ahead` are not in it;
    its rows may still be on their way."""

    save_s: float
    leavings: Sequence[UploadToHost] = ()

    @property
    def finished(self) -> bool:
        return all(one.finished for one in self.leavings)

    def hidden_s(self) -> float:
        """Seconds in which rows left the device while nobody waited for it. Waits for their end."""
        for one in self.leavings:
            one.wait()
        return sum(one.hidden_s for one in self.leavings)


class CachesBetweenTurns(ABC):
    """One per run: it knows how caches of its engine are started. `stores`: what it keeps may get lost."""

    stores: ClassVar[bool] = False

    def __init__(self, start: NewCache) -> None:
        self.start = start

    def expect(self, size: int) -> None:  # noqa: B027
        """Conversations will come whose keys and values take so many bytes, and no clock runs yet."""

    def resume(self, session: str, tokens: Sequence[int], capacity: int, whole: int = 0) -> ResumedCache:
        """A cache for the next turn, with as many of `tokens` as are to be had. Its layers may still be on their way:
        each is waited for when it is used, and may turn out to be damaged (`HistoryLost`, which `compute` handles).

        `tokens`: the text so far, without what must be fed in any case, as a prompt's last token for its logits. A
        cache that `save` was given alive comes back as it is: `open_turn` before a prefill. `whole`: how many tokens
        the text has with those; where that decides how the model rotates, a history that is rotated otherwise is of no
        use.
        """
        began = perf_counter()
        found = self._find(session, tokens, capacity, max(whole, len(tokens)))
        wait_for(found.cache.state.request.device)
        waited_s = found.loading.overlap.exposed_s if found.loading is not None else 0.0  # `compute` adds all of it
        return replace(found, load_s=perf_counter() - began - waited_s)

    def compute(
        self, found: ResumedCache, tokens: Sequence[int], prefill: Prefill
    ) -> tuple[ResumedCache, Tensor | None]:
        """`prefill` what `found` lacks of the text. -> what there was to be had; logits of the last token, None where
        nothing was lacking. A history that turns out to be damaged on its way is computed again, in a fresh cache."""
        try:
            logits = _computed(found.cache, tokens[found.reused :], prefill)
        except HistoryLost:
            found = self._anew(found)
            logits = _computed(found.cache, tokens, prefill)
        if found.loading is not None:
            wait_for(found.cache.state.request.device)
            overlap = found.loading.finish()
            waited_s = found.load_s + overlap.exposed_s
            found = replace(found, load_s=waited_s, hidden_s=overlap.hidden_s, loading=None)
        return found, logits

    @abstractmethod
    def _find(self, session: str, tokens: Sequence[int], capacity: int, whole: int) -> ResumedCache: ...

    def _anew(self, found: ResumedCache) -> ResumedCache:
        """Nothing of what was found may be used."""
        fresh = self.start(found.cache.capacity)
        fresh.take_text(found.cache)
        return ResumedCache(fresh, load_s=found.load_s)

    def save_ahead(self, session: str, tokens: Sequence[int], cache: KVCache) -> float:
        """The prompt is prefilled and not sealed, or the answer has come to `leaves_at`: what `save` will be given may
        begin to leave the device. `tokens`: all that was fed to `cache`. -> seconds that the caller waited"""
        began = perf_counter()
        self._leave_ahead(session, tokens, cache)
        return perf_counter() - began

    def _leave_ahead(self, session: str, tokens: Sequence[int], cache: KVCache) -> None:  # noqa: B027
        """Where something can leave before the turn has ended."""

    def leaves_at(self, cache: KVCache) -> float:
        """How many tokens `cache` holds when `save_ahead` is to be called again; infinity for never."""
        return inf

    def save(self, session: str, tokens: Sequence[int], cache: KVCache) -> Saved:
        """The turn has ended. `tokens`: all that was fed to `cache`, which belongs to this object now."""
        if len(tokens) != cache.num_tokens:
            raise ValueError(
                f"The cache holds {cache.num_tokens} tokens and {len(tokens)} were named: name those that were fed, "
                "without an answer's last."
            )
        began = perf_counter()
        leavings = self._keep(session, tokens, cache)
        return Saved(perf_counter() - began, leavings)

    @abstractmethod
    def _keep(self, session: str, tokens: Sequence[int], cache: KVCache) -> Sequence[UploadToHost]:
        """-> what goes on behind the caller's back"""

    def shorten(
        self, session: str, tokens: Sequence[int], keep: int, capacity: int, *, sinks: int = 0, naive: bool = False
    ) -> list[int]:
        """Cuts a history of `tokens` to `keep` at most: its first `sinks` and its last (truncation.py).
        -> the text that it stands for now. Where it is not to be had any more, that text will be computed."""
        found = self.resume(session, tokens, capacity)
        try:
            found.cache.await_layers()
        except HistoryLost:
            return both_ends(tokens, keep, sinks)
        finally:
            if found.loading is not None:
                found.loading.account()
        if found.reused < len(tokens):
            return both_ends(tokens, keep, sinks)
        fresh = self._cut(found.cache, tokens, keep, capacity, sinks, naive)
        kept = both_ends(tokens, fresh.num_tokens, sinks)
        self.save(session, kept, fresh)
        return kept

    def _cut(self, cache: KVCache, tokens: Sequence[int], keep: int, capacity: int, sinks: int, naive: bool) -> KVCache:
        """A fresh cache with what stays of `cache`, which holds `tokens`."""
        contents, fresh = cache.whole_contents(), self.start(capacity)
        rotations = [Rotation(layer.spec.rope, fresh.state.request.dtype) for layer in fresh.layers]
        for rotation in rotations:
            rotation.check(len(tokens))
        fresh.refill(truncated(contents, fresh.layers, rotations, keep, sinks=sinks, naive=naive))
        fresh.stages = cache.stages
        return fresh

    def forget(self, session: str) -> None:  # noqa: B027 (a store has its own rules)
        """The conversation is over."""

    def enqueue(self, session: str) -> None:  # noqa: B027
        """A turn of the session waits, behind those that wait already."""

    def dequeue(self, session: str) -> None:  # noqa: B027
        """Its turn starts, or is given up."""

    def prefetch(self) -> None:  # noqa: B027
        """Move the sessions of the turns that wait closer to the device."""

    def ahead(self, session: str, tokens: Sequence[int], whole: int = 0) -> None:  # noqa: B027
        """The next `resume` is this one's: the first layers, as many as the read buffer holds, may come now."""

    def close(self) -> None:  # noqa: B027
        """Call it once, at the end of the run."""


class Recompute(CachesBetweenTurns):
    """Nothing is kept: every turn computes the whole text again."""

    def _find(self, session: str, tokens: Sequence[int], capacity: int, whole: int) -> ResumedCache:
        return ResumedCache(self.start(capacity))

    def _keep(self, session: str, tokens: Sequence[int], cache: KVCache) -> Sequence[UploadToHost]:
        return ()


class DevicePrefix(CachesBetweenTurns):
    """Caches stay alive on the device, as many as there are conversations. One that holds anything but the beginning
    of what is asked for is of no use, and is let go."""

    def __init__(self, start: NewCache) -> None:
        super().__init__(start)
        self._alive: dict[str, tuple[list[int], KVCache]] = {}

    def _find(self, session: str, tokens: Sequence[int], capacity: int, whole: int) -> ResumedCache:
        held, cache = self._alive.pop(session, ([], None))
        if cache is None or list(tokens[: len(held)]) != held:
            return ResumedCache(self.start(capacity))
        if not cache.fits(whole):
            return ResumedCache(self.start(capacity), outgrown=True)
        if cache.capacity < capacity:
            small, cache = cache, self.start(capacity)
            cache.refill(small.contents())
            cache.stages = small.stages
        return ResumedCache(cache, len(held), DEVICE)

    def _keep(self, session: str, tokens: Sequence[int], cache: KVCache) -> Sequence[UploadToHost]:
        self._alive[session] = list(tokens), cache
        return ()

    def forget(self, session: str) -> None:
        self._alive.pop(session, None)

    def close(self) -> None:
        self._alive.clear()


def _computed(cache: KVCache, tokens: Sequence[int], prefill: Prefill) -> Tensor | None:
    if not tokens:
        cache.await_layers()
        return None
    cache.open_turn()
    return prefill(cache, tokens)


def both_ends(tokens: Sequence[int], keep: int, sinks: int) -> list[int]:
    """The first `sinks` and the last, `keep` in all."""
    return [*tokens[:sinks], *tokens[len(tokens) - keep + sinks :]]
