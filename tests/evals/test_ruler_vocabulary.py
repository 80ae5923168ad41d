"""The sorted list of adjective-noun keys without building it, and the private random streams."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.ruler.vocabulary import PairIndex, Streams, distinct_words, keys, word_lists

names = st.lists(st.text(alphabet="ab-", min_size=1, max_size=4), min_size=1, max_size=8)


@given(names, names)
def test_equals_the_sorted_set_of_pairs(adjectives: list[str], nouns: list[str]) -> None:
    whole = sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    assert list(PairIndex(adjectives, nouns)) == whole


def test_continued_adjectives_interleave() -> None:
    index = PairIndex(["old", "x", "old-fashioned"], ["zoo", "abbey", "fan"])
    assert list(index[1:4]) == ["old-fan", "old-fashioned-abbey", "old-fashioned-fan"]
    with pytest.raises(IndexError):
        index[9]


def test_wonderwords_keys_stand_where_the_official_list_has_them() -> None:
    """A third of a million of the 6.17 million: all hyphenated families, with all nouns."""
    adjectives, nouns = (sorted(set(word_lists()[kind])) for kind in ("adjective", "noun"))
    stems = {word.split("-")[0] for word in adjectives if "-" in word}
    chosen = [word for word in adjectives if word.split("-")[0] in stems] + adjectives[::30]
    assert list(PairIndex(chosen, nouns)) == sorted({f"{adjective}-{noun}" for adjective in chosen for noun in nouns})


def test_all_keys_ascend() -> None:
    assert len(keys()) == 6_171_620
    places = sorted(random.Random(0).sample(range(len(keys()) - 1), 50_000))
    assert all(keys()[place] < keys()[place + 1] for place in places)


@pytest.fixture
def _global_generators() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


@pytest.mark.usefixtures("_global_generators")
def test_streams_are_those_of_the_global_generators() -> None:
    streams = Streams(7)
    random.seed(7)
    np.random.seed(7)
    assert streams.number() == str(random.randint(10**6, 10**7 - 1))
    assert streams.letters("abc", 3) == "".join(random.choices("abc", k=3))
    assert streams.value() == str(np.random.randint(10000, 99999))
    before = random.getstate()
    streams.uuid()
    assert random.getstate() == before


def test_distinct_words() -> None:
    assert len(distinct_words()) == 8166
