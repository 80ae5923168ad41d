"""Needle in a haystack: where it stands, how long the prompt is, when it is found, and which text fills it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from evals import haystack
from evals.base import TaskEnv, TaskError
from tests.evals.counting import CountedText, Words
from tests.fast import niah


def env(seed: int = 0) -> TaskEnv:
    return TaskEnv(text=Words(), seed=seed)


@pytest.mark.parametrize("needle", ["magic_city", "passkey", "sandwich"])
def test_the_prompt_has_the_length_asked_for_and_the_needle_in_it(needle: str) -> None:
    for example in niah(lengths=[250], depths=5, needle=needle).examples(env()):
        assert Words().count(example.context + example.question, example.prefix) in range(240, 251)
        assert example.context.count(example.data["needle"]) == 1
        assert all(answer in example.data["needle"] for answer in example.references)


def test_the_needle_stands_behind_the_sentence_end_before_its_depth() -> None:
    depths = [0, 20, 50, 80, 100]
    for example, depth in zip(niah(lengths=[900], depths=depths).examples(env()), depths, strict=True):
        before, _, after = example.context.partition(example.data["needle"])
        if depth:
            assert before.rstrip()[-1] in ".!?" or depth == 100
            share = len(before.split()) / (len(before.split()) + len(after.split()))
            assert depth / 100 - 0.12 < share <= depth / 100 + 0.01
        else:
            assert not before.strip()


def test_a_length_without_room_names_the_smallest() -> None:
    with pytest.raises(TaskError, match=r"use at least (\d+)") as error:
        list(niah(lengths=[30]).examples(env()))
    least = int(re.findall(r"at least (\d+)", str(error.value))[0])
    assert list(niah(lengths=[least]).examples(env()))
    twice = CountedText()
    twice.count = lambda *texts, **more: 2 * CountedText.count(twice, *texts, **more)  # type: ignore[method-assign]
    with pytest.raises(TaskError, match=r"task\.lengths=150 leaves"):  # which holds the frame, but not what fills it
        list(niah(lengths=[150]).examples(replace(env(), text=twice)))


def test_a_number_of_depths_is_even_steps_of_tenths() -> None:
    assert niah(depths=4).percents == [0.0, 33.3, 66.7, 100.0]  # they are part of a prompt's seed
    assert niah(depths=1001).percents[:3] == [0.0, 0.1, 0.2]
    for depths in ([0], [0.0, 1.0, 2.5], [1, 100]):
        assert niah(depths=depths).percents == depths


def files_env(root: Path | None) -> TaskEnv:
    return TaskEnv(text=CountedText(), seed=1, data_root=root)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"text": text}))


def test_auto_prefers_all_essays_then_the_49_then_python_itself(tmp_path: Path) -> None:
    assert haystack.load("auto", files_env(None)).name == "pydoc"
    write(tmp_path / "paul_graham_essays_repo49.json", "forty-nine")
    assert haystack.load("auto", files_env(tmp_path)).text == "forty-nine"
    write(tmp_path / "essays" / "PaulGrahamEssays.json", "all")
    found = haystack.load("auto", files_env(tmp_path))
    assert (found.name, found.text, found.sha256) == ("essays", "all", hashlib.sha256(b"all").hexdigest())
    assert haystack.load("essays49", files_env(tmp_path)).text == "forty-nine"
