"""Conversations in a `HistoryStore`: a turn loads what is stored of its text, and stores what is new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple
from weakref import WeakKeyDictionary

from harness.cachedattention.store.block import HistoryLost, Loss
from harness.cachedattention.store.fingerprint import EXACT, behind_cut, computed_again, rotated_for
from harness.cachedattention.store.history_load import HistoryLoad
from harness.cachedattention.store.history_store import NOTHING, HistoryStore
from harness.cachedattention.store.upload import UploadToHost, as_given
from harness.cachedattention.turns.caches import CachesBetweenTurns, NewCache, ResumedCache, both_ends
from harness.cachedattention.turns.rows import CacheContents, StoredForm
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from methods.tiers.block import Tensors
from methods.tiers.codec import PLAIN


class TokensDigest(NamedTuple):
    """Tokens, known again without being kept."""

    length: int
    digest: int

    @classmethod
    def of(cls, tokens: Sequence[int]) -> TokensDigest:
        return cls(len(tokens), hash(tuple(tokens)))


@dataclass(slots=True)
class RowsSentAhead:
    """Rows that leave ahead of a save: of the tokens from `start` to `end`, in the order of `leavings`."""

    start: int
    end: int
    leavings: list[UploadToHost] = field(default_factory=list)


class StoredCaches(CachesBetweenTurns):
    """Between turns a conversation has no cache on the device but what the store keeps there.

    A method whose rows stay (`Method.rows_stay`) uses any prefix that is stored, and a turn writes its own rows alone.
    Every other method goes on where the text is the same to its last token, else everything is computed; a turn writes
    the whole session.

    What a cut left is of a lineage of its own, and so is what was computed behind it (store/fingerprint.py).
    A session is asked for under the lineage that it was saved with here; one that was not, as EXACT.

    A history that was stored and is not there is computed again, as any other text. Where that gives something else
    than what was stored, the turn is `lost`, and what it computes is of a lineage of its own too.

    Where the model rotates by the length of the text, a history serves as long as the text is rotated as it was. Of a
    text whose tokens are rotated in several ways nothing is stored, since no later text is rotated so.
    """

    stores = True

    def __init__(
        self,
        start: NewCache,
        attachment: Attachment,
        store: HistoryStore,
        read_buffer: int | None = None,
    ) -> None:
        """`read_buffer`: layers that `ahead` loads; None: as many as the paper's formula says. Raise `ValueError` where
        `store` shares and rows are not what every conversation would compute."""
        super().__init__(start)
        self.store, self.cut, self.read_buffer = store, StoredForm(attachment), read_buffer
        if store.share and not self.cut.shareable:
            raise ValueError(
                "share=True is for methods that keep all rows and read all of them, and this attachment's method does "
                "not: open the store with share=False."
            )
        self._device, self._stage = attachment.model.device, attachment.stage
        self._stages: dict[str, int | None] = {}  # by session: how what is stored of it is rotated; None: not stored
        self._lineages: dict[str, str] = {}  # by session
        self._behind: WeakKeyDictionary[KVCache, str] = WeakKeyDictionary()  # the lineages of caches that are in use
        self._early: WeakKeyDictionary[KVCache, RowsSentAhead] = WeakKeyDictionary()
        self._ahead: dict[str, tuple[list[int], HistoryLoad | None]] = {}  # by session, with the tokens asked for
        self._held: dict[str, TokensDigest] = {}  # by session: what is to be found of it
        self._asked: WeakKeyDictionary[KVCache, tuple[str, Sequence[int]]] = WeakKeyDictionary()  # of it, by whom

    def expect(self, size: int) -> None:
        self.store.expect(size)

    def _find(self, session: str, tokens: Sequence[int], capacity: int, whole: int) -> ResumedCache:
        if self._stages.get(session, self._stage(whole)) != self._stage(whole):
            self._give_up(session)
            self._held.pop(session, None)
            cache = self.start(capacity)
            self._behind[cache] = self._lineage(session)
            return ResumedCache(cache, outgrown=True)
        asked, loading = self._ahead.pop(session, (None, None))
        if asked != list(tokens):
            _cancel(loading)
            loading = self._open(session, tokens, whole)
        cache, held = self.start(capacity), tokens[: self._to_be_found(session, tokens)]
        if loading is None or not _begun(loading):
            return ResumedCache(cache, lost=self._lost(session, held, cache))
        self._behind[cache], self._asked[cache] = self._lineage(session), (session, held)
        cache.refill_by_layer(loading.tokens, lambda layer: loading.layer(layer)[0])
        cache.stages = {self._stage(whole)}
        return ResumedCache(cache, loading.tokens, loading.tier, loading=loading)

    def _anew(self, found: ResumedCache) -> ResumedCache:
        fresh = super()._anew(found)
        return replace(fresh, lost=self._lost(*self._asked.pop(found.cache), fresh.cache))

    def _to_be_found(self, session: str, tokens: Sequence[int]) -> int:
        """How many of the first `tokens` were stored, where computing them again would not give the same."""
        held = self._held.get(session)
        if held is None or TokensDigest.of(tokens[: held.length]) != held:
            return 0
        plain = self.store.format.codec == PLAIN and self._lineage(session) == EXACT
        return 0 if plain and self.cut.repeatable else held.length

    def _lost(self, session: str, held: Sequence[int], cache: KVCache) -> Loss | None:
        """Why, if `held`, which `cache` will compute again, was to be found."""
        if not held:
            return None
        loss = self.store.loss(session) or Loss.DAMAGED
        if not self.cut.repeatable:
            self._behind[cache] = computed_again(self._lineage(session), held)
        return loss

    def ahead(self, session: str, tokens: Sequence[int], whole: int = 0) -> None:
        if session not in self._ahead and self.read_buffer != 0:
            self._ahead[session] = list(tokens), self._open(session, tokens, max(whole, len(tokens)))

    def _open(self, session: str, tokens: Sequence[int], whole: int) -> HistoryLoad | None:
        states = self.cut.states(len(tokens), self._device, whole)
        lineage = rotated_for(self._lineage(session), self._stage(whole))
        return self.store.open(session, tokens, self.read_buffer, states, lineage)

    def _lineage(self, session: str) -> str:
        return self._lineages.get(session, EXACT)

    def _leave_ahead(self, session: str, tokens: Sequence[int], cache: KVCache) -> None:
        """Whole blocks of rows, of a method that leaves these as they are: no later step writes to them."""
        if not (self.cut.by_token and self.store.contents.lanes.beside and cache.fits(cache.capacity)):
            return
        if (early := self._early.get(cache)) is None:
            lineage = rotated_for(self._behind.get(cache, EXACT), self._stage(cache.capacity))
            known = self.store.known(session, tokens, lineage)
            early = self._early[cache] = RowsSentAhead(known, known)
        if whole := (len(tokens) - early.end) // self.store.block_tokens * self.store.block_tokens:
            leaving = self._leaving(cache.contents(), tokens[: early.end + whole], early.end, cache.capacity)
            early.leavings.append(leaving)
            early.end += whole

    def leaves_at(self, cache: KVCache) -> float:
        early = self._early.get(cache)
        return inf if early is None else early.end + self.store.block_tokens

    def _keep(self, session: str, tokens: Sequence[int], cache: KVCache) -> Sequence[UploadToHost]:
        contents, lineage = cache.contents(), self._behind.pop(cache, EXACT)
        self._lineages[session], self._held[session] = lineage, TokensDigest.of(tokens)
        stage = self._stages[session] = self._stage(len(tokens)) if cache.fits(len(tokens)) else None
        if stage is None:
            self._early.pop(cache, None)
            self._held.pop(session)
            return ()
        lineage = rotated_for(lineage, stage)
        known = self.store.known(session, tokens, lineage) if self.cut.by_token else 0
        early = self._early.pop(cache, None)
        leaving, end = list[UploadToHost](), known
        for begun in early.leavings if early is not None and early.start == known else ():
            text = begun.text
            if text != list(tokens[end : end + len(text)]):  # an answer that another one has replaced
                break
            leaving.append(begun)
            end += len(text)
        leaving.append(self._leaving(contents, tokens, end, len(tokens), self.cut.rest(contents)))
        if not self.store.hold(session, known, leaving, lineage):
            leaving = [self._leaving(contents, tokens, 0, len(tokens), self.cut.rest(contents))]
            self.store.hold(session, 0, leaving, lineage)
        return leaving

    def _leaving(
        self, contents: CacheContents, tokens: Sequence[int], start: int, text: int, rest: Tensors = NOTHING
    ) -> UploadToHost:
        """Those of `tokens` from `start` on, rotated for a text of `text` tokens."""
        end = len(tokens)
        rows = self.cut.rows(contents, start, end) if start < end else {}
        stored = self.cut.unrotated(start, end, rows, text) if rows else as_given
        return self.store.leave(tokens[start:], rows, rest, stored)

    def shorten(
        self, session: str, tokens: Sequence[int], keep: int, capacity: int, *, sinks: int = 0, naive: bool = False
    ) -> list[int]:
        """Rows before their rotation are let go of where they lie, if the oldest go and nothing is rotated."""
        if naive:
            raise ValueError("A store has keys before their rotation: take the device's own cache for NKVT.")
        before = self._lineage(session)
        if sinks or not self.cut.rows_alone:
            kept = super().shorten(session, tokens, keep, capacity, sinks=sinks)
        else:
            self._give_up(session)
            self.cut.check(len(tokens))
            if self.store.known(session, tokens, before) == len(tokens):
                self.store.truncate(session, (keep + 0.5) / len(tokens))
            kept = both_ends(tokens, keep, sinks)
        if self._held.get(session) != (
            text := TokensDigest.of(kept)
        ):  # it is to be found, and is not there if it got lost
            self._held[session] = text
            self._lineages[session] = behind_cut(before, tokens, len(tokens) - len(kept), sinks)
        return kept

    def _cut(self, cache: KVCache, tokens: Sequence[int], keep: int, capacity: int, sinks: int, naive: bool) -> KVCache:
        fresh = super()._cut(cache, tokens, keep, capacity, sinks, naive)
        dropped = len(tokens) - fresh.num_tokens
        self._behind[fresh] = behind_cut(self._behind.pop(cache, EXACT), tokens, dropped, sinks)
        return fresh

    def forget(self, session: str) -> None:
        self._give_up(session)
        for known in (self._lineages, self._held, self._stages):
            known.pop(session, None)

    def enqueue(self, session: str) -> None:
        self.store.enqueue(session)

    def dequeue(self, session: str) -> None:
        self.store.dequeue(session)

    def prefetch(self) -> None:
        self.store.prefetch()

    def close(self) -> None:
        for session in list(self._ahead):
            self._give_up(session)
        self.store.close()

    def _give_up(self, session: str) -> None:
        """What comes ahead of a turn that does not."""
        _cancel(self._ahead.pop(session, (None, None))[1])


def _cancel(loading: HistoryLoad | None) -> None:
    if loading is not None:
        loading.cancel()


def _begun(loading: HistoryLoad) -> bool:
    """Whether the rows are there that the job begins with."""
    try:
        loading.begin()
    except HistoryLost:
        return False
    return True
