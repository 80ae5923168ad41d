"""Conversations: lengths by the published law, facts told before they are asked, overflows, files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals.base import Example, TaskEnv, TaskError
from evals.multiturn import Multiturn
from evals.multiturn.length_distribution import drawn, statistics
from evals.multiturn.overflow import NeedlesBehindOverflow
from tests.evals.counting import Chat, Words

FACT = re.compile(r"The special magic (\w+) number is: (\d{7})\.")


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


def test_real_files_are_read(shared_data: Path) -> None:
    given = env(data_root=shared_data / "multiturn")
    assert (
        len(talks(given, source="fastchat_dummy_conversation.json", conversations=400, turns=1, replies="given")) == 400
    )
    assert {len(talk.turns) for talk in talks(given, source="mt_bench_question.jsonl", conversations=80)} == {2}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"longest": 8192}, "task.longest"),
        ({"source": "two.jsonl", "conversations": 1, "replies": "given"}, "has no replies: set task.replies=own"),
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
    (tmp_path / "two.jsonl").write_text('{"question_id": 1, "turns": ["Who is Ada?", "And Bo?"]}')
    with pytest.raises(TaskError, match=key):
        talks(env(data_root=tmp_path), **changes)
    with pytest.raises(TaskError, match=r"task\.facts=390"):
        examples(facts=390)


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
