"""Stand-ins for a model's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence


class CountedText:
    """A token is a word; counts how often it is asked."""

    fingerprint = "whitespace"

    def __init__(self) -> None:
        self.calls = 0
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        start = len(self.words)
        self.words += text.split()
        return list(range(start, len(self.words)))

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[i] for i in ids)

    def count(
        self, user: str, prefix: str = "", *, system: str = "", chat: bool = True, earlier: Sequence[str] = ()
    ) -> int:
        self.calls += 1
        return len("".join((system, *earlier, user, prefix)).split())


class Words:
    """A token is a word with the white space before it."""

    fingerprint = "words"

    def __init__(self) -> None:
        self.known: list[str] = []
        self.index: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        pieces = re.findall(r"\s*\S+|\s+$", text)
        for piece in pieces:
            if piece not in self.index:
                self.index[piece] = len(self.known)
                self.known.append(piece)
        return [self.index[piece] for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.known[i] for i in ids)

    def count(self, user: str, prefix: str = "", *, system: str = "", chat: bool = True) -> int:
        return len(self.encode(user)) + len(self.encode(prefix)) + len(self.encode(system))
