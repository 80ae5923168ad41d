"""Needle in a haystack: where it stands, how long the prompt is, when it is found, and which text fills it."""

from __future__ import annotations

import doctest
import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from evals import haystack, needles
from evals.base import TaskEnv, TaskError
from evals.needles import SANDWICH
from evals.niah import Niah
from harness.config.catalogue import CONF
from tests.evals.counting import CountedText, Words
from tests.fast import niah


def env(seed: int = 0) -> TaskEnv:
    return TaskEnv(text=Words(), seed=seed)


def test_lengths_times_depths_in_a_fixed_order() -> None:
    examples = list(niah(lengths=[300, 600], depths=3, rounds=2).examples(env()))
    assert [example.id for example in examples][:4] == [
        "magic_city/300/0/0", "magic_city/300/0/1", "magic_city/300/50/0", "magic_city/300/50/1"
    ]  # fmt: skip
    assert len(examples) == 12
    assert {example.group for example in examples} == {"magic_city/300", "magic_city/600"}
    assert examples == list(niah(lengths=[300, 600], depths=3, rounds=2).examples(env()))
    assert examples != list(niah(lengths=[300, 600], depths=3, rounds=2).examples(env(seed=1)))


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


def test_scores() -> None:
    (number,) = niah(depths=[0]).examples(env())
    assert niah().score(number, f"It is {number.references[0]}.").value == 1
    half = niah().score(number, f"It is {number.references[0][:3]}.")
    assert (half.value, half.details["leading_digits"]) == (0, 3)
    assert niah().averages({"g": 0.0}, half.details) == {"mean": 0, "leading_digits_share": pytest.approx(3 / 7)}
    words = niah(needle="sandwich")
    (sandwich,) = words.__class__.examples(niah(needle="sandwich", depths=[0]), env())
    assert words.score(sandwich, f"You should {SANDWICH}").value == 1
    assert words.score(sandwich, "Eat a sandwich!").details == {"exact": 0.0}
    assert words.score(sandwich, "eat a sandwich").value == pytest.approx(3 / 11)
    assert words.score(sandwich, "").value == 0


def test_doctests() -> None:
    results = doctest.testmod(needles)
    assert (results.failed, results.attempted > 2) == (0, True)


def preset(name: str, **changes: Any) -> Niah:
    values = yaml.safe_load((CONF / "task" / f"{name}.yaml").read_text())
    del values["_target_"]
    return Niah(**values | changes)


def test_pqcaches_prompt_is_the_papers() -> None:
    (example,) = preset("niah_pqcache", lengths=[600], depths=[50]).examples(env())
    assert example.context.startswith("You are a helpful AI bot that answers questions for a user. Keep your response")
    assert "direct.\n        Document:\n        ```\n        " in example.context
    assert example.question == (
        "\n```\n        What is the best thing to do in San Francisco? Don't give information outside the document or "
        "repeat your findings.\n"
    )
    assert example.references == (SANDWICH,)
    assert (example.max_new_tokens, max(preset("niah_pqcache").lengths)) == (128, 30000)


def test_shadowkvs_prompt_and_grid_are_the_papers() -> None:
    task = preset("niah_shadowkv", lengths=[600])
    examples = list(task.examples(env()))
    assert [example.data["depth"] for example in examples] == [0, 11, 22, 33, 44, 56, 67, 78, 89, 100]
    for example in examples:
        number, city = example.references[0], example.question.partition("magic ")[2].partition(" number?")[0]
        assert f"\nThe special magic {city} number is: {number}\n" in example.context
        assert example.question.endswith("Keep your response short and direct. Answer: ")
        assert example.context.startswith("Write a high-quality answer for the given question using only the provided")
        assert example.max_new_tokens == 10
    lengths = preset("niah_shadowkv").lengths
    assert (len(lengths), lengths[0], lengths[-1], {b - a for a, b in pairwise(lengths)}) == (15, 16384, 131072, {8192})


def files_env(root: Path | None) -> TaskEnv:
    return TaskEnv(text=CountedText(), seed=1, data_root=root)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"text": text}))


def test_doctests_of_haystacks() -> None:
    assert doctest.testmod(haystack) == (0, 1)


def test_auto_prefers_all_essays_then_the_49_then_python_itself(tmp_path: Path) -> None:
    assert haystack.load("auto", files_env(None)).name == "pydoc"
    write(tmp_path / "paul_graham_essays_repo49.json", "forty-nine")
    assert haystack.load("auto", files_env(tmp_path)).text == "forty-nine"
    write(tmp_path / "essays" / "PaulGrahamEssays.json", "all")
    found = haystack.load("auto", files_env(tmp_path))
    assert (found.name, found.text, found.sha256) == ("essays", "all", hashlib.sha256(b"all").hexdigest())
    assert haystack.load("essays49", files_env(tmp_path)).text == "forty-nine"
