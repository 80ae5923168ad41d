"""Where a conversation's cache is between two turns: nowhere, on the device, or in a store (stored.py).

`Conversation` (conversation.py) calls `resume`, `compute`, `save_ahead` and `save` in each turn, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import ClassVar

from torch import Tensor

from harness.cachedattention.store.block import HistoryLost
from harness.cachedattention.store.history_load import HistoryLoad
from harness.cachedattention.store.upload import UploadToHost
from harness.cachedattention.turns.truncation import Rotation, truncated
from harness.engine.cache import KVCache
from harness.models.devices import wait_for
from methods.tiers.tier import DEVICE

Prefill = Callable[[KVCache, Sequence[int]], Tensor]  # -> logits of the last token [1 V]
NewCache = Callable[[int], KVCache]  # tokens of all turns, prompts and answers, at most -> a fresh cache


@dataclass(frozen=True, slots=True)
class ResumedCache:
    """A cache that holds the first `reused` tokens of those asked for, found in `tier`; None on a miss.

    `load_s`: seconds that the turn has waited for it, also for a fresh one; `hidden_s`: seconds in which its layers
    were on their way while the turn computed. Both are complete after `compute`, and so is `lost`: why what was stored
    is not there, where computing it again gives something else. `outgrown`: it was there, and the longer text is
    rotated otherwise.
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
    """A turn that was saved. `save_s`: seconds that the caller waited at its end, without those of `save_ahead`; its
    rows may still be on their way, in `uploads`."""

    save_s: float
    uploads: Sequence[UploadToHost] = ()

    @property
    def finished(self) -> bool:
        return all(upload.finished for upload in self.uploads)

    def hidden_s(self) -> float:
        """Wait until all rows have left the device; return the seconds of that in which nobody waited."""
        for upload in self.uploads:
            upload.wait()
        return sum(upload.hidden_s for upload in self.uploads)


class CachesBetweenTurns:
    """The caches of a run's conversations, one object per run. This class keeps nothing: every turn computes the whole
    text again (history=recompute). `start` makes a fresh cache. `stores`: what is kept may get lost."""

    stores: ClassVar[bool] = False

    def __init__(self, start: NewCache) -> None:
        self.start = start

    def expect(self, size: int) -> None:
        """Make room before any clock runs: conversations will come whose keys and values take `size` bytes."""

    def resume(self, session: str, tokens: Sequence[int], capacity: int, whole: int = 0) -> ResumedCache:
        """Return a cache for the next turn, with as many of `tokens` as are to be had. Its layers may still be on their
        way: each is waited for when it is used, and may prove damaged (`HistoryLost`, which `compute` handles).

        `tokens`: the text so far, without what must be fed in any case, such as a prompt's last token for its logits. A
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
        """Prefill what `found` lacks of the text. Return what there was to be had, and the logits of the last token,
        None where nothing was lacking. A history that proves damaged on its way is computed again, in a fresh cache."""
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

    def save_ahead(self, session: str, tokens: Sequence[int], cache: KVCache) -> float:
        """Let rows that `save` will be given begin to leave the device: the prompt is prefilled and not sealed.
        `tokens`: all that was fed to `cache`. Return the seconds that the caller waited."""
        began = perf_counter()
        self._leave_ahead(session, tokens, cache)
        return perf_counter() - began

    def save(self, session: str, tokens: Sequence[int], cache: KVCache) -> Saved:
        """End a turn. `tokens`: all that was fed to `cache`, which belongs to this object from now on."""
        began = perf_counter()
        uploads = self._keep(session, tokens, cache)
        return Saved(perf_counter() - began, uploads)

    def shorten(
        self, session: str, tokens: Sequence[int], keep: int, capacity: int, *, sinks: int = 0, naive: bool = False
    ) -> list[int]:
        """Cut a history of `tokens` to `keep` at most, its first `sinks` and its last (truncation.py). Return the text
        that it stands for now. Where the history is gone, that text will be computed."""
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

    def forget(self, session: str) -> None:
        """Let go of a conversation that is over."""

    def enqueue(self, session: str) -> None:
        """Note that a turn of the session waits, after those that wait already."""

    def dequeue(self, session: str) -> None:
        """Note that the session's turn starts, or is given up."""

    def prefetch(self) -> None:
        """Move the sessions of the turns that wait closer to the device."""

    def ahead(self, session: str, tokens: Sequence[int], whole: int = 0) -> None:
        """Load the first layers, as many as the read buffer holds: the next `resume` will ask for just this."""

    def close(self) -> None:
        """End the run; call it once."""

    def _find(self, session: str, tokens: Sequence[int], capacity: int, whole: int) -> ResumedCache:
        return ResumedCache(self.start(capacity))

    def _anew(self, found: ResumedCache) -> ResumedCache:
        """Return a fresh cache where nothing of what was found may be used."""
        fresh = self.start(found.cache.capacity)
        fresh.take_text(found.cache)
        return ResumedCache(fresh, load_s=found.load_s)

    def _leave_ahead(self, session: str, tokens: Sequence[int], cache: KVCache) -> None:
        """Begin to move rows, where some can leave before the turn has ended."""

    def _keep(self, session: str, tokens: Sequence[int], cache: KVCache) -> Sequence[UploadToHost]:
        """Keep the cache for the next turn; return the uploads that go on while the caller does."""
        return ()

    def _cut(self, cache: KVCache, tokens: Sequence[int], keep: int, capacity: int, sinks: int, naive: bool) -> KVCache:
        """Return a fresh cache with what stays of `cache`, which holds `tokens`."""
        contents, fresh = cache.whole_contents(), self.start(capacity)
        rotations = [Rotation(layer.spec.rope, fresh.state.request.dtype) for layer in fresh.layers]
        for rotation in rotations:
            rotation.check(len(tokens))
        fresh.refill(truncated(contents, fresh.layers, rotations, keep, sinks=sinks, naive=naive))
        fresh.stages = cache.stages
        return fresh


class DevicePrefix(CachesBetweenTurns):
    """Caches that stay alive on the device, as many as there are conversations. One that holds anything but the
    beginning of what is asked for is of no use, and is let go."""

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
    """Return the first `sinks` tokens and the last ones, `keep` in all."""
    return [*tokens[:sinks], *tokens[len(tokens) - keep + sinks :]]
