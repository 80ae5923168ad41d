"""Conversations: lengths by the published law, facts told before they are asked, overflows, files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals.base import Example, TaskEnv, TaskError
from evals.haystack import load
from evals.multiturn import Multiturn
from evals.multiturn.length_distribution import drawn, opened, statistics
from evals.multiturn.overflow import NeedlesBehindOverflow
from tests.evals.counting import Words

FACT = re.compile(r"The special magic (\w+) number is: (\d{7})\.")


def test_a_lengthened_opening_is_made_up_for_by_what_comes_after() -> None:
    assert opened([(10, 20), (30, 40)], 55) == [(55, 10), (15, 20)]
    assert opened([(10, 20), (30, 40)], 10) == [(10, 20), (30, 40)]
    assert opened([(10, 2), (3, 4)], 55) == [(55, 1), (1, 1)]


class Chat(Words):
    """Words in a chat template of four tokens, seven in a first turn."""

    def count(self, user: str, prefix: str = "", *, system: str = "", chat: bool = True) -> int:
        return super().count(user, prefix, system=system, chat=chat) + (4 if system else 7)


def env(**changes: Any) -> TaskEnv:
    return replace(TaskEnv(text=Chat(), seed=0, window=4096), **changes)


def talks(given: TaskEnv | None = None, **changes: Any) -> list[Example]:
    drawn = {} if "source" in changes else {"haystack": "pydoc"}
    return list(Multiturn(**{**drawn, **changes}).examples(given or env()))


def history(turns: Sequence[Example]) -> str:
    """All that is said before the question of the last of `turns`."""
    return "\n".join(f"{one.reply or ''}\n{one.context}{one.question}" for one in turns)


def test_the_law_is_the_published_one_at_any_scale() -> None:
    for scale in (1.0, 0.125):
        lengths = drawn(9000, np.random.default_rng(1), scale=scale)
        found = statistics([[(tokens // 2, tokens - tokens // 2) for tokens in one] for one in lengths], scale)
        assert found["mean_turns"] == pytest.approx(5.75, abs=0.15)
        assert found["one_turn"] == pytest.approx(0.27, abs=0.015)
        assert found["over_2k_tokens"] == pytest.approx(0.47, abs=0.02)
        assert found["over_4k_tokens"] == pytest.approx(0.30, abs=0.02)
    assert {len(one) for one in drawn(50, np.random.default_rng(1), turns=6)} == {6}


@pytest.mark.parametrize("replies", ["own", "given"])
def test_each_turn_asks_for_a_fact_that_was_told_once_before(replies: str) -> None:
    made = talks(conversations=12, replies=replies)
    assert {len(talk.turns) for talk in made} > {1, 2}
    for talk in made:
        turns = talk.turns
        asked = [re.findall(r"What is the special magic (\w+) number", one.question)[-1] for one in turns]
        assert len(set(asked)) == len(turns)
        for number, (turn, city) in enumerate(zip(turns, asked, strict=True), 1):
            told = turns[turn.data["told_in"] - 1]
            assert turn.data["turns_ago"] == number - turn.data["told_in"] >= 0
            assert dict(FACT.findall(told.context + told.question))[city] == turn.references[0]
            before = history(turns[: number - 1]) + turn.context + turn.question
            assert before.count(turn.references[0]) == 1  # and no reply has given it away
        assert talk.data["turns"] == len(turns)
    depths = {turn.data["turns_ago"] for talk in made for turn in talk.turns}
    assert {0, 1, 2, 3} <= depths


def test_the_first_turn_may_be_what_all_ask_about() -> None:
    for talk in talks(conversations=3, turns=6, about="first"):
        assert [turn.data["turns_ago"] for turn in talk.turns] == list(range(6))
        assert len(FACT.findall(talk.context)) == 6


def test_lengths_are_scaled_to_the_window_and_what_came_out_is_recorded() -> None:
    task, given = Multiturn(haystack="pydoc", conversations=60), env()
    made = list(task.examples(given))
    said = task.provenance()
    assert said["scale"] == pytest.approx((4096 - 8) / 32768)
    assert said["statistics"]["sessions"] == 60
    assert said["statistics"]["turns"] == sum(len(talk.turns) for talk in made)
    assert said["statistics"]["question_share"] == pytest.approx(0.45, abs=0.2)
    for talk in made:
        texts = (len(given.text.encode(one.context + one.question)) + 7 + one.max_new_tokens for one in talk.turns)
        assert sum(texts) <= 4096
    assert made == talks(conversations=60)
    assert made != talks(env(seed=1), conversations=60)
    longest = {limit: max(map(_words, talks(conversations=60, longest=limit, opening=1))) for limit in (1024, 4096)}
    assert longest[4096] > 2 * longest[1024]


def _words(talk: Example) -> int:
    return len(history(talk.turns).split())


def test_a_first_question_is_long_enough_for_a_budget() -> None:
    lengths = [len(talk.context.split()) + 10 for talk in talks(conversations=40, opening=200)]
    assert min(lengths) > 180
    assert len([length for length in lengths if length < 220]) > 30
    assert min(len(talk.context.split()) for talk in talks(conversations=40, opening=1)) < 50


@pytest.mark.parametrize("chosen", [{"turns": 3}, {"turns": 8, "about": "first"}], ids=str)
def test_a_conversation_at_the_limit_is_shortened_not_lost(chosen: dict[str, Any]) -> None:
    """The law draws sessions that fill the window; whole sentences and facts go beyond that."""
    made = talks(env(seed=42, window=8192), **chosen)
    assert [len(talk.turns) for talk in made] == [chosen["turns"]] * 20
    assert min(len(talk.context.split()) for talk in made) > 200


def test_a_given_reply_is_right_and_stands_before_the_next_turn() -> None:
    for talk in talks(conversations=4, turns=4, replies="given"):
        for before, turn in zip(talk.turns, talk.turns[1:], strict=False):
            assert before.references[0] in turn.reply.split(".")[0]
            assert turn.max_new_tokens == 24
    assert all(turn.reply is None for talk in talks(conversations=4) for turn in talk.turns)


def test_forced_replies_are_the_texts_own_and_their_likelihood_is_the_score() -> None:
    task = Multiturn(haystack="pydoc", conversations=3, turns=3, replies="forced")
    assert (task.metric, task.chance) == ("perplexity", None)
    for talk in task.examples(env()):
        assert talk.teacher_forced
        assert not FACT.search(history(talk.turns))
        assert all(turn.references[0].strip() and (turn.context + turn.question).strip() for turn in talk.turns)
    assert task.score(talk, "0.5").value == math.exp(-0.5)
    assert task.averages({"multiturn": 0.6}, {"nll": 0.5}) == {"mean": 0.6, "perplexity": math.exp(0.5)}


def test_a_right_answer_counts_and_the_digits_of_others() -> None:
    task = Multiturn()
    (talk,) = talks(conversations=1)
    assert task.score(talk, f"It is {talk.references[0]}!").value == 1.0
    almost = task.score(talk, talk.references[0][:3])
    assert (almost.value, almost.details["leading_digits"]) == (0.0, 3.0)
    assert (task.metric, task.chance) == ("needle found", 0.0)


# files

SHAREGPT = [
    {"id": "none", "conversations": [{"from": "gpt", "value": "Hello"}]},
    {
        "id": "two",
        "conversations": [
            {"from": "human", "value": "Who is Ada?"},
            {"from": "gpt", "value": "A mathematician of the nineteenth century."},
            {"from": "human", "value": "And Bo?"},
            {"from": "gpt", "value": "Nobody knows."},
            {"from": "human", "value": "Bye"},
        ],
    },
]
MTBENCH = [{"question_id": 81, "turns": ["Write a post.", "Rewrite it."]}, {"question_id": 82, "turns": ["Say no."]}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "talks.json").write_text(json.dumps(SHAREGPT))
    (tmp_path / "mt.jsonl").write_text("\n".join(map(json.dumps, MTBENCH)))
    return tmp_path


def test_a_file_of_sharegpt_brings_text_and_replies(folder: Path) -> None:
    given = env(data_root=folder)
    (talk,) = talks(given, source="talks.json", conversations=1, replies="given")
    assert talk.id == "conversation-two"
    assert talk.context.startswith("Who is Ada?\n\nThe special magic ")
    (second,) = talk.further
    assert second.reply.endswith(". A mathematician of the nineteenth century.")
    assert second.question.startswith("And Bo?\n\n")
    (own,) = talks(given, source=str(folder / "talks.json"), conversations=1, max_new_tokens=3)
    assert [turn.max_new_tokens for turn in own.turns] == [6, 3]
    (forced,) = talks(given, source="talks.json", conversations=1, replies="forced")
    assert [turn.references for turn in forced.turns] == [
        ("A mathematician of the nineteenth century.",),
        ("Nobody knows.",),
    ]
    assert [turn.context + turn.question for turn in forced.turns] == ["Who is Ada?", "And Bo?"]


def test_a_file_of_mt_bench_has_questions_alone(folder: Path) -> None:
    given = env(data_root=folder)
    made = talks(given, source="mt.jsonl", conversations=2)
    assert [(talk.id, len(talk.turns)) for talk in made] == [("conversation-81", 2), ("conversation-82", 1)]
    assert [talk.id for talk in talks(given, source="mt.jsonl", conversations=1, turns=2)] == ["conversation-81"]
    with pytest.raises(TaskError, match="replies"):
        talks(given, source="mt.jsonl", conversations=1, replies="given")


def test_turns_of_a_file_that_do_not_fit_are_left_out(folder: Path) -> None:
    given = env(data_root=folder)
    (talk,) = talks(given, source="talks.json", conversations=1, longest=70)
    assert len(talk.turns) == 1
    with pytest.raises(TaskError, match=r"task\.longest"):
        talks(given, source="talks.json", conversations=1, longest=70, turns=2)


def test_real_files_are_read(shared_data: Path) -> None:
    given = env(data_root=shared_data / "multiturn")
    assert (
        len(talks(given, source="fastchat_dummy_conversation.json", conversations=400, turns=1, replies="given")) == 400
    )
    assert {len(talk.turns) for talk in talks(given, source="mt_bench_question.jsonl", conversations=80)} == {2}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"replies": "mine"}, "task.replies"),
        ({"conversations": 0}, "task.conversations"),
        ({"turns": 41}, "task.turns"),
        ({"template": "{text}"}, "{question}"),
        ({"question_share": 1.0}, "question_share"),
        ({"longest": 8192}, "task.longest"),
        ({"longest": 208, "conversations": 2}, "task.opening"),
        ({"source": "mt.jsonl", "turns": 2}, "mt.jsonl"),
        ({"source": "/absent.json"}, "absent.json"),
        ({"source": "rows.jsonl"}, "row 1"),
    ],
    ids=str,
)
def test_what_cannot_be_is_named(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}')
    (tmp_path / "mt.jsonl").write_text('{"question_id": 1, "turns": ["Who is Ada?"]}')
    with pytest.raises(TaskError, match=key):
        talks(env(data_root=tmp_path), **changes)
    for wrong in ({"facts": 390}, {"questions": 1}, {"questions": 99}, {"template": "What?"}):
        with pytest.raises(TaskError):
            examples(**wrong)


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


def test_an_answer_is_scored_by_the_number() -> None:
    [example, *_], _ = examples()
    task = NeedlesBehindOverflow()
    assert task.score(example, f"It is {example.references[0]}.").value == 1
    assert task.score(example, "I do not know.").value == 0
