"""Sessions whose rows can be told from their tokens, for tests of the history store."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from harness.cachedattention.store.block import HistoryLost
from harness.cachedattention.store.fingerprint import EXACT, Fingerprint
from harness.cachedattention.store.history_store import HistoryStore

PRINT = Fingerprint(
    model="toy", weights="1", tokenizer="bytes", rotary="default, keys before rotation", dtype="float32"
)
LAYERS, HEADS, WIDTH = 2, 2, 4
TOKEN_BYTES = LAYERS * 2 * HEADS * WIDTH * 4


def rows(session: str, tokens: Sequence[int], start: int = 0) -> dict[str, Tensor]:
    """[HEADS, tokens, WIDTH] by name; each number depends on session, layer, position and token."""
    places = torch.arange(start, start + len(tokens), dtype=torch.float64)
    base = places * 7 + torch.tensor(tokens, dtype=torch.float64) * 1000 + zlib.crc32(session.encode()) % 997
    shape = torch.arange(HEADS * WIDTH, dtype=torch.float64).view(HEADS, 1, WIDTH) / 16
    made = {}
    for layer in range(LAYERS):
        for place, name in enumerate("kv"):
            made[f"{layer}.{name}"] = (base.view(1, -1, 1) + shape + layer / 4 + place / 8).float()
    return made


class Found(NamedTuple):
    """What was found of a session: so many tokens, their rows by name, and what belongs to all of them together."""

    tokens: int = 0
    tier: str | None = None
    layers: Mapping[str, Tensor] = {}
    rest: Mapping[str, Tensor] = {}


class WholeStore(HistoryStore):
    """Takes and gives all layers of a session at once, as no turn of a conversation does."""

    def extend(
        self, session: str, start: int, tokens: Sequence[int], layers: Mapping[str, Tensor],
        rest: Mapping[str, Tensor] = {}, lineage: str = EXACT,
    ) -> bool:  # fmt: skip
        upload = self.leave(tokens, layers, rest)
        upload.wait()
        return self.hold(session, start, [upload], lineage)

    def put(self, session: str, *given: Any, **more: Any) -> None:
        self.extend(session, 0, *given, **more)

    def get(self, session: str, tokens: Sequence[int], lineage: str = EXACT) -> Found:
        if (loading := self.open(session, tokens, lineage=lineage)) is None:
            return Found()
        try:
            layers = [loading.layer(number) for number in loading.layers]
        except HistoryLost:
            return Found()
        loading.account()
        return Found(loading.tokens, loading.tier, *({name: x for part in side for name, x in part.items()}
                                                     for side in zip(*layers, strict=True)))  # fmt: skip


def opened(folder: Path | None = None, **settings: Any) -> WholeStore:
    """Of 10,000 tokens in memory and on disk each, if nothing else is said."""
    usual = {"host": 10_000 * TOKEN_BYTES, "disk": 10_000 * TOKEN_BYTES if folder else 0, "block_tokens": 4}
    usual["threads"] = 0
    return WholeStore(PRINT, folder=folder, **usual | settings)


def full_disk(patch: pytest.MonkeyPatch, after: int = 0) -> None:
    """From the next block of a store on, or behind so many files and folders of it; other files have room."""
    real, written = os.fsync, count()

    def fsync(fd: int) -> None:
        if "/blocks/" in os.readlink(f"/proc/self/fd/{fd}") and next(written) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    patch.setattr(os, "fsync", fsync)


def right(found: Found, session: str, tokens: Sequence[int], dropped: int = 0) -> bool:
    """Whether the rows found are those of the tokens asked for, `dropped` positions farther on."""
    if not found.tokens:
        return found.layers == {}
    expected = rows(session, tokens[: found.tokens], dropped)
    return found.layers.keys() == expected.keys() and all(
        torch.equal(found.layers[name], expected[name]) for name in expected
    )
