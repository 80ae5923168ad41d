"""Where the answers of real tasks stand, and what is no needle."""

from __future__ import annotations

import pytest

from evals.base import Example, Task
from evals.niah import Niah
from evals.ruler import Ruler
from harness.config.settings import Settings
from harness.diagnosis.needles import missing, needles, plain
from harness.jobs.planning.items import Item, prepare
from harness.prompts.prompt import render
from tests.fast import MODEL, niah

TOKENIZER = MODEL.tokenizer()


def words(item: Item, positions: tuple[int, ...]) -> str:
    return str(TOKENIZER.decode([item.prompt.ids[at] for at in positions]))


def example(**changes: object) -> Example:
    usual = {"id": "a", "group": "g", "context": "", "references": ("31337",), "max_new_tokens": 4, "chat": False}
    return Example(**usual | changes)  # type: ignore[arg-type]


def found(one: Example) -> list[str]:
    prompt = render(one, TOKENIZER, chat="none")
    return [TOKENIZER.decode([prompt.ids[i] for i in n.positions]) for n in needles(one, prompt, TOKENIZER)]


@pytest.mark.parametrize("task", [niah(), niah(needle="passkey"), niah(needle="sandwich")])
def test_a_planted_sentence_is_found_whole(task: Niah) -> None:
    for item in prepare(task, MODEL, Settings()):
        (needle,) = needles(item.example, item.prompt, TOKENIZER)
        assert words(item, needle.positions).strip() == item.example.data["needle"]


@pytest.mark.parametrize("kind", ["niah_single_2", "niah_multikey_1", "niah_multivalue", "niah_multiquery"])
def test_every_answer_of_ruler_has_its_sentence(kind: str) -> None:
    task: Task = Ruler(tasks=[kind], lengths=[4224], samples=2)
    for item in prepare(task, MODEL, Settings(), strict=False):
        places = needles(item.example, item.prompt, TOKENIZER)
        assert [needle.answer for needle in places] == list(item.example.references)
        for needle in places:
            assert words(item, needle.positions).startswith("One of the special magic numbers for ")
            assert words(item, needle.positions).endswith(f"is: {needle.answer}.")


def test_a_needle_in_the_part_that_was_cut_has_no_position() -> None:
    text = "word. " * 50 + "The key is 31337. " + "word. " * 50
    assert found(example(context=text)) == ["The key is 31337."]
    cut = example(context=text, max_prompt_tokens=60)
    prompt = render(cut, TOKENIZER, chat="none")
    assert [needle.positions for needle in needles(cut, prompt, TOKENIZER)] == [()]


@pytest.mark.parametrize(
    "one",
    [
        example(context="nothing here"),
        example(context="131337 is longer"),
        example(context="31337 " * 9),
        example(context="31337", teacher_forced=True),
    ],
)
def test_what_is_no_needle(one: Example) -> None:
    assert found(one) == []


def test_missing_answers_are_followed_and_if_none_is_all_are() -> None:
    one = example(context="It is 31337. Or 4242.", references=("31337", "4242"))
    both = needles(one, render(one, TOKENIZER, chat="none"), TOKENIZER)
    assert [n.answer for n in missing(both, "31,337!")] == ["4242"]
    assert missing(both, "31337 4242") == both
    assert plain(" 31,337\n") == "31337"
