"""A history that a further turn comes behind: the beginning of a text, prefilled and sealed, and stored in a tier."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.conversations.conversation import Conversation
from harness.conversations.fingerprint import fingerprint
from harness.conversations.stored import StoredHistories
from harness.engine.attach import Attachment
from harness.engine.batch.slot import Decoded
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.history.store import HistoryStore
from harness.models.base import LoadedModel
from methods.tiers.tier import tier_of

SESSION = "session"
ROOM = 1 << 50  # bytes of a tier: all there is


class History:
    """The first `count` tokens of `text`, in `cache`."""

    def __init__(self, kv: Attachment, loaded: LoadedModel, text: Sequence[int], count: int) -> None:
        self.kv, self.text, self.count = kv, list(text), count
        self._fingerprint = fingerprint(kv, loaded)
        self._engine = Engine(kv)
        self.cache = self.start(count)
        self.prefill(self.cache, self.tokens)
        self.cache.seal()

    @property
    def tokens(self) -> list[int]:
        return self.text[: self.count]

    def start(self, capacity: int) -> KVCache:
        return self.kv.start(KVCache, capacity=capacity)

    def prefill(self, cache: KVCache, tokens: Sequence[int]) -> Tensor:
        return self._engine.prefill(cache, torch.tensor([tokens], device=self.kv.model.device))

    def first_token(self, talk: Conversation) -> int:
        """Of the turn that has been resumed."""
        logits = talk.compute(self.prefill)
        assert logits is not None
        return int(logits.argmax())

    def decode(self, cache: KVCache, logits: Tensor, steps: int, decoded: Decoded | None = None) -> list[int]:
        """-> the tokens that were fed to a prefilled cache"""
        nothing = torch.empty(1, 0, dtype=torch.long, device=self.kv.model.device)
        made = self._engine.complete(cache, logits, nothing, began=0.0, max_new_tokens=steps + 1, decoded=decoded)
        return made.tokens[0][:-1]

    def opened(self, closing: ExitStack, **settings: Any) -> StoredHistories:
        """An empty store, which ends with `closing`."""
        store = closing.enter_context(
            HistoryStore(self._fingerprint, on=str(self.kv.model.device), engine=self.kv.engine, **settings)
        )
        histories = StoredHistories(self.start, self.kv, store)
        held = sum(x.nbytes for state in self.cache.contents() for x in state.values())
        histories.expect(held * len(self.text) // self.count)
        return histories

    def stored(self, tier: str, folder: Path, closing: ExitStack) -> StoredHistories:
        """A store that has nothing but this tier, with this history in it. `folder`: of the disk's."""
        place: dict[str, Any] = {tier: ROOM, "folder": folder if tier_of(tier).in_files else None}
        histories = self.opened(closing, **place)
        histories.save(SESSION, self.tokens, self.cache)
        histories.store.flush()
        return histories


def forget(folder: Path) -> None:
    """Lets the system drop the pages of all files in `folder`, which are on disk already."""
    for path in folder.rglob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
