"""Stand-ins for a model's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


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


class Chat(Words):
    """Words in a chat template of four tokens, seven in a first turn."""

    def count(self, user: str, prefix: str = "", *, system: str = "", chat: bool = True) -> int:
        return super().count(user, prefix, system=system, chat=chat) + (4 if system else 7)


class Bytes:
    """A token is a byte, so characters may be split between tokens. With `strips` a text loses its first space when it
    is decoded, as tokenizers in the manner of sentencepiece have it."""

    fingerprint = "bytes"

    def __init__(self, *, strips: bool = False) -> None:
        self.strips = strips

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return bytes(ids).decode(errors="replace").removeprefix(" " * self.strips)

    def count(self, user: str, prefix: str = "", *, system: str = "", chat: bool = True) -> int:
        return len((user + prefix + system).encode())
