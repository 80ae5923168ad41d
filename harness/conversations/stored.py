"""Conversations in a `HistoryStore`: a turn loads what is stored of its text, and stores what is new."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from harness.conversations.histories import Histories, Resumed, Start, both_ends
from harness.conversations.rows import Contents, Cut
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.history.block import Rows
from harness.history.fingerprint import EXACT, behind_cut
from harness.history.overlap.leaving import Copying, Leaving, as_given
from harness.history.overlap.loading import HistoryLost, Loading
from harness.history.store import NOTHING, HistoryStore


class StoredHistories(Histories):
    """Between turns a conversation has no cache on the device but what the store keeps there.

    A method whose rows stay (`Method.rows_stay`) uses any prefix that is stored, and a turn writes its own rows alone.
    Every other method goes on where the text is the same to its last token, else everything is computed; a turn writes
    the whole session.

    What a cut left is of a lineage of its own, and so is what was computed behind it (harness/history/fingerprint.py).
    A session is asked for under the lineage that it was saved with here; one that was not, as EXACT.
    """

    def __init__(
        self, start: Start, attachment: Attachment, store: HistoryStore, read_buffer: int | None = None
    ) -> None:
        """`read_buffer`: layers that `ahead` loads; None: as many as the paper's formula says. Raises `ValueError`
        where `store` shares and rows are not what every conversation would compute."""
        super().__init__(start)
        self.store, self.cut, self.read_buffer = store, Cut(attachment), read_buffer
        if store.share and not self.cut.shareable:
            raise ValueError(
                "share=True is for methods that keep all rows and read all of them, and this attachment's method does "
                "not: open the store with share=False."
            )
        self._device = attachment.model.device
        self._lineages: dict[str, str] = {}  # by session
        self._behind: WeakKeyDictionary[KVCache, str] = WeakKeyDictionary()  # the lineages of caches that are in use
        self._early: WeakKeyDictionary[KVCache, tuple[int, Leaving]] = WeakKeyDictionary()  # from which token on
        self._ahead: dict[str, tuple[list[int], Loading | None]] = {}  # by session, with the tokens asked for

    def _find(self, session: str, tokens: Sequence[int], capacity: int) -> Resumed:
        self.cut.check(capacity)
        asked, loading = self._ahead.pop(session, (None, None))
        if asked != list(tokens):
            loading = self._open(session, tokens)
        cache = self.start(capacity)
        if loading is None:
            return Resumed(cache)
        try:
            loading.begin()
        except HistoryLost:
            return Resumed(cache)
        self._behind[cache] = self._lineage(session)
        cache.refill_by_layer(loading.tokens, lambda layer: loading.layer(layer)[0])
        return Resumed(cache, loading.tokens, loading.tier, loading=loading)

    def ahead(self, session: str, tokens: Sequence[int]) -> None:
        if session not in self._ahead and self.read_buffer != 0:
            self._ahead[session] = list(tokens), self._open(session, tokens)

    def _open(self, session: str, tokens: Sequence[int]) -> Loading | None:
        states = self.cut.states(len(tokens), self._device)
        return self.store.open(session, tokens, self.read_buffer, states, self._lineage(session))

    def _lineage(self, session: str) -> str:
        return self._lineages.get(session, EXACT)

    def _leave_ahead(self, session: str, tokens: Sequence[int], cache: KVCache) -> None:
        """Whole blocks of rows, of a method that leaves these as they are: no later step writes to them."""
        if not (self.cut.by_token and self.store.has_threads):
            return
        known = self.store.known(session, tokens, self._behind.get(cache, EXACT))
        whole = (len(tokens) - known) // self.store.block_tokens * self.store.block_tokens
        if whole:
            self._early[cache] = known, self._leaving(cache.contents(), tokens[: known + whole], known)

    def _keep(self, session: str, tokens: Sequence[int], cache: KVCache) -> Sequence[Copying]:
        contents, lineage = cache.contents(), self._behind.pop(cache, EXACT)
        self._lineages[session] = lineage
        known = self.store.known(session, tokens, lineage) if self.cut.by_token else 0
        start, early = self._early.pop(cache, (known, None))
        leaving, end = [], known
        if early is not None and start == known and early.text == list(tokens[known:][: len(early.text)]):
            leaving, end = [early], known + len(early.text)
        leaving.append(self._leaving(contents, tokens, end, self.cut.rest(contents)))
        if not self.store.hold(session, known, leaving, lineage):
            leaving = [self._leaving(contents, tokens, 0, self.cut.rest(contents))]
            self.store.hold(session, 0, leaving, lineage)
        return [one.copying for one in leaving]

    def _leaving(self, contents: Contents, tokens: Sequence[int], start: int, rest: Rows = NOTHING) -> Leaving:
        """Those of `tokens` from `start` on."""
        end = len(tokens)
        rows = self.cut.rows(contents, start, end) if start < end else NOTHING
        turn = self.cut.unrotated(start, end, self._device) if rows else as_given
        return self.store.leave(tokens[start:], rows, rest, turn)

    def shorten(
        self, session: str, tokens: Sequence[int], keep: int, capacity: int, *, sinks: int = 0, naive: bool = False
    ) -> list[int]:
        """Rows before their rotation are let go of where they lie, if the oldest go and nothing is rotated."""
        if naive:
            raise ValueError("A store has keys before their rotation: take the device's own cache for NKVT.")
        if sinks or not self.cut.rows_alone:
            return super().shorten(session, tokens, keep, capacity, sinks=sinks)
        self._ahead.pop(session, None)
        self.cut.check(len(tokens))
        if self.store.known(session, tokens, self._lineage(session)) == len(tokens):
            self.store.truncate(session, (keep + 0.5) / len(tokens))
            self._lineages[session] = self.store.lineage(session) or EXACT
        return both_ends(tokens, keep, sinks)

    def _cut(self, cache: KVCache, tokens: Sequence[int], keep: int, capacity: int, sinks: int, naive: bool) -> KVCache:
        fresh = super()._cut(cache, tokens, keep, capacity, sinks, naive)
        dropped = len(tokens) - fresh.num_tokens
        self._behind[fresh] = behind_cut(self._behind.pop(cache, EXACT), tokens, dropped, sinks)
        return fresh

    def forget(self, session: str) -> None:
        self._lineages.pop(session, None)

    def enqueue(self, session: str) -> None:
        self.store.enqueue(session)

    def dequeue(self, session: str) -> None:
        self.store.dequeue(session)

    def prefetch(self) -> None:
        self.store.prefetch()

    def close(self) -> None:
        self.store.close()
