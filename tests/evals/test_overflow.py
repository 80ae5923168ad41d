"""Questions behind an overflow: what fills the window, where the facts stand, who is asked what."""

from __future__ import annotations

from typing import Any

import pytest

from evals.base import Example, TaskEnv, TaskError
from evals.haystack import load
from evals.multiturn.overflow import NeedlesBehindOverflow
from tests.evals.test_niah import Words

SMALL: dict[str, Any] = {"window": 400, "facts": 80, "conversations": 3, "haystack": "pydoc"}


def examples(seed: int = 0, **more: Any) -> tuple[list[Example], Words]:
    words = Words()
    made = NeedlesBehindOverflow(**SMALL | more).examples(TaskEnv(text=words, seed=seed))
    return list(made), words


def test_the_first_turn_fills_the_window_and_the_second_overflows() -> None:
    found, words = examples()
    assert len(found) == 3
    for example in found:
        first = words.count(example.context + example.question)
        second = words.count(example.further[0].question)
        assert 400 - 16 <= first + example.max_new_tokens <= 400
        assert first + second + example.max_new_tokens > 400


def test_facts_stand_at_the_end_and_each_is_asked_for_once() -> None:
    found, words = examples(questions=5)
    for example in found:
        turns = example.turns
        answers = [turn.references[0] for turn in turns]
        assert len(set(answers)) == len(turns) == 5
        assert [turn.data["turn"] for turn in turns] == [1, 2, 3, 4, 5]
        needles = 5 * words.count("\nThe special magic Rome number is: 1\n")
        end = words.decode(words.encode(example.context)[-80 - needles - 10 :])
        places = [end.index(answer) for answer in answers]
        assert places == sorted(places)


def test_a_text_shorter_than_the_window_is_read_again() -> None:
    words, task = Words(), NeedlesBehindOverflow(**SMALL | {"window": 120_000, "conversations": 1})
    text = load("pydoc", TaskEnv(text=words, seed=0))
    assert words.count(text.text) < 100_000
    [example] = task.examples(TaskEnv(text=words, seed=0))
    first = words.count(example.context + example.question)
    assert 120_000 - 16 <= first + example.max_new_tokens <= 120_000
    assert task.provenance() == {"origin": "text of pydoc", "sha256": text.sha256}


def test_conversations_follow_the_seed() -> None:
    contexts = {example.context for seed in (0, 0, 1) for example in examples(seed)[0]}
    assert len(contexts) == 6


def test_an_answer_is_scored_by_the_number() -> None:
    [example, *_], _ = examples()
    task = NeedlesBehindOverflow()
    assert task.score(example, f"It is {example.references[0]}.").value == 1
    assert task.score(example, "I do not know.").value == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"facts": 390}, "fewer than task.facts=390"),
        ({"questions": 1}, "task.questions 2"),
        ({"questions": 99}, "too many"),
        ({"template": "What?"}, "must hold {question}"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        examples(**wrong)
