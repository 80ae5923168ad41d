"""Where a conversation's KV cache is between two turns: nowhere, on the device, or in a store
(stored.py).

`Conversation` (conversation.py) calls `resume`, `compute`, `save_ahead` and `save` in each turn, in
this order."""

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
# tokens of all turns, prompts and answers, at most -> a fresh cache
NewCache = Callable[[int], KVCache]


@dataclass(frozen=True, slots=True)
class ResumedCache:
    """The KV cache with which a turn of a conversation begins. It holds the first `reused` tokens
    of the text, which were found in `tier`; None on a miss.

    `load_s`: seconds that the turn has waited for it, also for a fresh one; `hidden_s`: seconds in
    which its layers were on their way while the turn computed. Both are complete after `compute`.
    `lost`: the reason why a stored history is gone, if computing it again gives something else than
    what was stored; also complete after `compute`. `outgrown`: the history was there, but the model
    rotates the longer text otherwise, so it is computed again."""

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
    """The result of saving a turn's cache. `save_s`: seconds that the caller waited at the turn's
    end, without those of `save_ahead`. Keys and values may still be on their way to host memory, in
    `uploads`."""

    save_s: float
    uploads: Sequence[UploadToHost] = ()

    @property
    def finished(self) -> bool:
        return all(upload.finished for upload in self.uploads)

    def hidden_s(self) -> float:
        """Wait until all rows have left the device; return in how many of these seconds rows moved
        and no caller waited."""
        for upload in self.uploads:
            upload.wait()
        return sum(upload.hidden_s for upload in self.uploads)


class CachesBetweenTurns:
    """The KV caches of a run's conversations between their turns, one object per run. This class
    keeps nothing: every turn computes the whole text again (history=recompute). `start`: makes a
    fresh cache for so many tokens. `stores`: whether caches are kept in a store, which may lose
    them."""

    stores: ClassVar[bool] = False

    def __init__(self, start: NewCache) -> None:
        self.start = start

    def expect(self, size: int) -> None:
        """Make room for conversations whose keys and values take `size` bytes together, before any
        time is measured."""

    def resume(
        self, session: str, tokens: Sequence[int], capacity: int, whole: int = 0
    ) -> ResumedCache:
        """Return a cache for the next turn of the conversation `session` that holds as many of
        `tokens`, from the first on, as were kept. Its layers may still be on their way: each is
        waited for when it is used, and may prove damaged (`HistoryLost`, which `compute` handles).
        A cache that stayed on the device comes back as `save` was given it: call its `open_turn`
        before a prefill.

        `tokens`: the text so far, without what must be fed in any case, such as a prompt's last
        token, whose logits are needed. `whole`: the length of the text with what must be fed; if
        the model rotates by the length of the text, a history that was rotated for another length
        is of no use."""
        began = perf_counter()
        found = self._find(session, tokens, capacity, max(whole, len(tokens)))
        wait_for(found.cache.state.request.device)
        # `compute` adds all of it
        waited_s = found.loading.overlap.exposed_s if found.loading is not None else 0.0
        return replace(found, load_s=perf_counter() - began - waited_s)

    def compute(
        self, found: ResumedCache, tokens: Sequence[int], prefill: Prefill
    ) -> tuple[ResumedCache, Tensor | None]:
        """Prefill what the cache `found` lacks of the text. Return `found` with its times and
        losses complete, and the logits of the last token, None where nothing was lacking. A history
        that proves damaged while it is loaded is computed again, in a fresh cache."""
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
        """Begin to copy rows of the prompt from the device to the store, after the prefill and
        before the seal, in which a method chooses what to keep; `save` will be given the same rows.
        `tokens`: all that was fed to `cache`. Return the seconds that the caller waited. This class
        stores nothing."""
        return 0.0

    def save(self, session: str, tokens: Sequence[int], cache: KVCache) -> Saved:
        """End a turn: keep `cache` for the next one. `tokens`: all that was fed to it. The cache
        belongs to this object from now on."""
        began = perf_counter()
        uploads = self._keep(session, tokens, cache)
        return Saved(perf_counter() - began, uploads)

    def shorten(
        self,
        session: str,
        tokens: Sequence[int],
        keep: int,
        capacity: int,
        *,
        sinks: int = 0,
        naive: bool = False,
    ) -> list[int]:
        """Cut the stored history of a conversation, `tokens`, to `keep` tokens at most: its first
        `sinks` and its last ones (truncation.py). `naive`: keys stay rotated to where they stood.
        Return the tokens that are left. Where the history is gone, or the model keeps states, the
        next turn computes them."""
        found = self.resume(session, tokens, capacity)
        try:
            found.cache.await_layers()
        except HistoryLost:
            return both_ends(tokens, keep, sinks)
        finally:
            if found.loading is not None:
                found.loading.account()
        # a state cannot forget the oldest tokens
        if found.reused < len(tokens) or found.cache.states is not None:
            return both_ends(tokens, keep, sinks)
        contents, fresh = found.cache.whole_contents(), self.start(capacity)
        rotations = [Rotation(layer.spec.rope, fresh.state.request.dtype) for layer in fresh.layers]
        for rotation in rotations:
            rotation.check(len(tokens))
        fresh.refill(truncated(contents, fresh.layers, rotations, keep, sinks=sinks, naive=naive))
        fresh.fed.stages = found.cache.fed.stages
        self._note_cut(found.cache, fresh, tokens, sinks)
        kept = both_ends(tokens, fresh.num_tokens, sinks)
        self.save(session, kept, fresh)
        return kept

    def forget(self, session: str) -> None:
        """Drop what is kept of a conversation that is over."""

    def enqueue(self, session: str) -> None:
        """Note that a turn of the conversation waits for its start, after those that wait
        already."""

    def dequeue(self, session: str) -> None:
        """Note that the conversation's turn does not wait any more: it starts, or is given up."""

    def prefetch(self) -> None:
        """Bring the histories of the turns that wait into a faster tier, as far as the store's
        policy looks ahead."""

    def ahead(self, session: str, tokens: Sequence[int], whole: int = 0) -> None:
        """Begin to load the first layers of a conversation's history, as many as the read buffer
        holds, because the next `resume` will ask for it with the same arguments."""

    def close(self) -> None:
        """Let go of all caches at the end of the run; call it once."""

    def _find(self, session: str, tokens: Sequence[int], capacity: int, whole: int) -> ResumedCache:
        return ResumedCache(self.start(capacity))

    def _anew(self, found: ResumedCache) -> ResumedCache:
        """Return a fresh cache for the same text, in place of `found`, whose rows proved to be
        damaged."""
        fresh = self.start(found.cache.capacity)
        fresh.fed.take(found.cache.fed)
        return ResumedCache(fresh, load_s=found.load_s)

    def _keep(self, session: str, tokens: Sequence[int], cache: KVCache) -> Sequence[UploadToHost]:
        """Keep the cache for the next turn. Return the uploads that go on copying its rows to host
        memory; none here."""
        return ()

    def _note_cut(self, cache: KVCache, fresh: KVCache, tokens: Sequence[int], sinks: int) -> None:
        """Note, in classes that store rows, that `fresh` has what stays of `cache`, which holds `tokens`."""


class DevicePrefix(CachesBetweenTurns):
    """Caches of conversations that stay on the device between two turns, one per conversation. A
    cache that holds anything but the beginning of the text asked for is dropped."""

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
            cache.fed.stages = small.fed.stages
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
    """Return the first `sinks` tokens and the last ones, `keep` tokens in all."""
    return [*tokens[:sinks], *tokens[len(tokens) - keep + sinks :]]
