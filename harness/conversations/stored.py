"""Conversations in a `HistoryStore`: a turn loads what is stored of its text, and stores what is new."""

from __future__ import annotations

from collections.abc import Sequence

from harness.conversations.histories import Histories, Start
from harness.conversations.rows import Cut
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.history.store import HistoryStore


class StoredHistories(Histories):
    """Between turns a conversation has no cache on the device but what the store keeps there.

    A method whose rows stay (`Method.rows_stay`) uses any prefix that is stored, and a turn writes its own rows alone.
    Every other method goes on where the text is the same to its last token, else everything is computed; a turn writes
    the whole session.
    """

    def __init__(self, start: Start, attachment: Attachment, store: HistoryStore) -> None:
        super().__init__(start)
        self.store, self.cut = store, Cut(attachment)

    def _find(self, session: str, tokens: Sequence[int], capacity: int) -> tuple[KVCache, int, str | None]:
        self.cut.check(capacity)
        found, cache = self.store.get(session, tokens), self.start(capacity)
        if found.tier is not None:
            self.cut.refill(cache, found.tokens, found.layers, found.rest)
        return cache, found.tokens, found.tier

    def _keep(self, session: str, tokens: Sequence[int], cache: KVCache) -> None:
        contents = cache.contents()
        known = self.store.known(session, tokens) if self.cut.by_token else 0
        rows, rest = self.cut.rows(contents, known), self.cut.rest(contents)
        if not self.store.extend(session, known, tokens[known:], rows, rest):
            self.store.put(session, tokens, self.cut.rows(contents, 0), rest)

    def enqueue(self, session: str) -> None:
        self.store.enqueue(session)

    def dequeue(self, session: str) -> None:
        self.store.dequeue(session)

    def prefetch(self) -> None:
        self.store.prefetch()

    def close(self) -> None:
        self.store.close()
