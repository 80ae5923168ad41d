"""Supplies what RULER prompts are made of: random streams, adjective-noun keys, numbers, uuids,
word lists."""

from __future__ import annotations

import bisect
import hashlib
import random
import uuid
from collections.abc import Sequence
from functools import cache
from importlib import resources
from itertools import accumulate
from typing import Any

import numpy as np


class Streams:
    """Draw random numbers in the same order as RULER's scripts, which seed Python's and NumPy's
    global generators once per process.

    Every draw below happens in the order of the scripts: one call more or less changes all later
    prompts."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.python = random.Random(seed)
        self.numpy = np.random.RandomState(seed)

    def shuffle(self, items: list[Any]) -> None:
        """Shuffle in place with a fresh generator of the same seed, so with the same permutation
        for every sample of a length."""
        random.Random(self.seed).shuffle(items)

    def number(self) -> str:
        """Draw a number of seven digits."""
        return str(self.python.randint(1_000_000, 9_999_999))

    def uuid(self) -> str:
        return str(uuid.UUID(int=self.python.getrandbits(128), version=4))

    def letters(self, alphabet: str, count: int) -> str:
        return "".join(self.python.choices(alphabet, k=count))

    def value(self) -> str:
        """Draw a number of five digits, which is never 99999."""
        return str(self.numpy.randint(10_000, 99_999))


class PairIndex:
    """List the distinct strings `adjective-noun` in order, and make each when it is asked for.

    The whole list has 6.17 million entries and takes seconds to build. An adjective's strings stand
    together in it, except where one adjective continues another after a hyphen (`old`,
    `old-fashioned`): those interleave and are kept as one block."""

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted(set(nouns))
        families = _families(set(adjectives))
        self._stems = sorted(families, key=lambda stem: stem + "-")
        self._mixed = {
            stem: sorted({f"{adjective}-{noun}" for adjective in family for noun in self._nouns})
            for stem, family in families.items()
            if len(family) > 1
        }
        sizes = (len(self._mixed.get(stem, self._nouns)) for stem in self._stems)
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> str:
        if index >= len(self):
            raise IndexError(index)
        block = bisect.bisect_right(self._ends, index)
        stem = self._stems[block]
        offset = index - (self._ends[block - 1] if block else 0)
        return self._mixed[stem][offset] if stem in self._mixed else f"{stem}-{self._nouns[offset]}"


def _families(adjectives: set[str]) -> dict[str, list[str]]:
    """Group adjectives by the shortest adjective of which they are a hyphenated continuation."""
    families: dict[str, list[str]] = {}
    for adjective in adjectives:
        cuts = (adjective[:i] for i, letter in enumerate(adjective) if letter == "-")
        stem = next((cut for cut in cuts if cut in adjectives), adjective)
        families.setdefault(stem, []).append(adjective)
    return families


@cache
def word_lists() -> dict[str, tuple[str, ...]]:
    """Read the lists `adjective`, `noun` and `verb` of the package wonderwords, in file order."""
    folder = resources.files("wonderwords.assets")
    kinds = ("adjective", "noun", "verb")
    texts = ((folder / f"{kind}list.txt").read_text(encoding="utf-8") for kind in kinds)
    lists = (tuple(map(str.rstrip, text.splitlines())) for text in texts)
    return dict(zip(kinds, lists, strict=True))


@cache
def words_sha256() -> str:
    """Return the SHA-256 of the word lists, which shape the prompts."""
    return hashlib.sha256(repr(sorted(word_lists().items())).encode()).hexdigest()


@cache
def keys() -> PairIndex:
    """Return the keys by which RULER's needles are named, all strings `adjective-noun`, in the
    order in which RULER draws from them."""
    lists = word_lists()
    return PairIndex(lists["adjective"], lists["noun"])


@cache
def distinct_words() -> tuple[str, ...]:
    """Return all distinct words of the three lists, sorted: 8166 in wonderwords 3.0.1."""
    return tuple(sorted({word for words in word_lists().values() for word in words}))
