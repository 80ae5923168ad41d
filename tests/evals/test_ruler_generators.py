"""RULER's prompts: equal to the official ones, sound below their lengths; their keys and random streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.base import TextTools
from evals.ruler.aggregation import CommonWords, FrequentWords
from evals.ruler.fitting import Generator, TooShort
from evals.ruler.niah import KINDS, Niah, essay_words
from evals.ruler.qa import Corpus, Question, QuestionAnswering
from evals.ruler.templates import FilledTemplate
from evals.ruler.tracing import Tracing
from evals.ruler.vocabulary import PairIndex, Streams
from tests.evals.counting import CountedText

WORDS = essay_words(" ".join(f"Sentence {i} is here. Is it? Yes, number {i}!" for i in range(3000)))


def corpus() -> Corpus:
    documents = tuple(f"Paragraph {i}. " + "some more words " * (5 + i % 12) for i in range(60))
    questions = tuple(Question(f"what is {i}?", (str(i),), (i,), (i, 30 + i), (50, 51, 52)) for i in range(20))
    return Corpus(questions, documents, "local:test", "")


def generator(task: str, length: int, seed: int = 42, text: TextTools | None = None) -> Generator:
    text, streams = text or CountedText(), Streams(seed)
    if task in KINDS:
        return Niah(text, streams, length, kind=KINDS[task], essay=WORDS)
    if task == "qa":
        return QuestionAnswering(text, streams, length, corpus=corpus())
    return {"vt": Tracing, "cwe": CommonWords, "fwe": FrequentWords}[task](text, streams, length)


ALL = [*KINDS, "vt", "cwe", "fwe", "qa"]


class Costly(CountedText):
    """So many tokens a word."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.factor = tokens

    def count(self, user: str, prefix: str = "", *, system: str = "", chat: bool = True) -> int:
        return self.factor * super().count(user, prefix, system=system, chat=chat)


def golden(folder: Path) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "golden" / "ruler_whitespace_tokenizer_seed42.jsonl").read_text().splitlines():
        rows.setdefault(json.loads(line)["task"], []).append(json.loads(line))
    return rows


def assert_equal(prompts: list[FilledTemplate], rows: list[dict[str, Any]]) -> None:
    for prompt, row in zip(prompts, rows, strict=True):
        assert prompt.user == row["input"]
        assert prompt.prefix == row["answer_prefix"]
        assert list(prompt.references) == row["outputs"]
        assert prompt.data["tokens"] == row["length"]


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"])
def test_official_prompts_of_the_whitespace_tokenizer(shared_data: Path, task: str) -> None:
    rows = golden(shared_data)[task]
    assert_equal(generator(task, 1024).prompts(len(rows)), rows)


@pytest.mark.parametrize("task", ALL)
@pytest.mark.parametrize("length", [512, 700, 1023])
def test_short_prompts_fill_their_length(task: str, length: int) -> None:
    fine = generator(task, length)
    for prompt in fine.prompts(8):
        tokens = len(prompt.text.split()) + fine.new_tokens
        assert prompt.data["tokens"] == tokens
        assert 0.85 * length <= tokens <= length


@pytest.mark.parametrize("task", ALL)
@pytest.mark.parametrize("length", [140, 1024])
def test_what_cannot_fit_ends(task: str, length: int) -> None:
    """Where every word is twelve tokens, the official scripts would draw for ever."""
    with pytest.raises(TooShort):
        generator(task, length, text=Costly(12)).prompts(2)


names = st.lists(st.text(alphabet="ab-", min_size=1, max_size=4), min_size=1, max_size=8)


@given(names, names)
def test_equals_the_sorted_set_of_pairs(adjectives: list[str], nouns: list[str]) -> None:
    whole = sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    assert list(PairIndex(adjectives, nouns)) == whole
