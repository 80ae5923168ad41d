"""SCBench: prompts and scores against what the official functions give, both modes, hub files, sentences.

scbench_prompts.json and scbench_vectors.json hold rows, outputs and answers made up here, with the texts and the scores
that the official code (MInference, scbench/eval_utils.py and compute_scores.py; rouge_score 0.1.2) makes of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from evals.base import Example, TaskEnv, TaskError
from evals.scbench import SCBench
from evals.scbench.tables import MAX_NEW_TOKENS
from harness.prompts.prompt import render, render_turn
from tests.evals.counting import Words

HERE = Path(__file__).parent
PROMPTS: dict[str, Any] = json.loads((HERE / "scbench_prompts.json").read_text(encoding="utf-8"))
VECTORS: list[dict[str, Any]] = json.loads((HERE / "scbench_vectors.json").read_text(encoding="utf-8"))


class Chat(Words):
    def count(self, user: str, prefix: str = "", *, system: str = "", chat: bool = True) -> int:
        return super().count(user, prefix) + 5

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).removeprefix(" ")  # in the manner of sentencepiece


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A data root with a row of every task, or the rows given."""

    def put(**rows: list[dict[str, Any]]) -> Path:
        (tmp_path / "scbench").mkdir(exist_ok=True)
        for name, known in PROMPTS.items():
            lines = (json.dumps(row, ensure_ascii=False) for row in rows.get(name, [known["row"]]))
            (tmp_path / "scbench" / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        return tmp_path

    return put


def examples(root: Path, *, plain: bool = False, window: int | None = None, **changes: Any) -> list[Example]:
    text = Words() if plain else Chat()
    env = TaskEnv(text=text, seed=0, data_root=root, window=window)
    return list(SCBench(**{"tasks": "all", **changes}).examples(env))


def by_task(made: list[Example]) -> dict[str, list[Example]]:
    return {name: [one for one in made if one.group == name] for name in PROMPTS}


class Template:
    """A tokenizer of characters with the template that the expected texts have."""

    chat_template, bos_token_id = "yes", None

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        offsets = [(place, place + 1) for place in range(len(text))]
        return {"input_ids": [*map(ord, text)], "offset_mapping": offsets}

    def apply_chat_template(self, turns: list[dict[str, str]], **options: Any) -> str:
        said = (f"<{turn['role']}>{turn['content']}</{turn['role']}>" for turn in turns)
        return "".join(said) + "<assistant>"


def test_prompts_are_the_official_texts(write: Callable[..., Path]) -> None:
    """In a template as --use_chat_template, which the official scripts set; math_find's later turns with the last one's
    question."""
    root, tokenizer = write(), cast(Any, Template())
    plain, in_chat, requests = by_task(examples(root, plain=True)), by_task(examples(root)), by_task(
        examples(root, mode="multi_request"))  # fmt: skip
    for name, official in PROMPTS.items():
        first, *later = plain[name][0].turns
        said = [first.context + first.question, *((one.reply or "") + one.question + one.prefix for one in later)]
        assert said == official["plain"], name
        first, *later = in_chat[name][0].turns
        prompts = [render(first, tokenizer, chat="template")]
        prompts += [render_turn(one, tokenizer, chat="template") for one in later]
        assert [prompt.text for prompt in prompts] == official["chat"], name
        assert all(prompt.replaces_answer for prompt in prompts[1:])
        context, *questions = official["requests"]
        asked = requests[name]
        assert {one.context for one in asked} == {context}
        assert [one.question for one in asked] == questions
        assert {(one.unit, one.further, one.max_new_tokens) for one in asked} == {
            (f"{name}/0", (), MAX_NEW_TOKENS[name])
        }


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['task']}-{vector['output'][:20]!r}")
def test_scores_are_the_official_ones_to_the_last_digit(vector: dict[str, Any], write: Callable[..., Path]) -> None:
    name = vector["task"]
    row = {**PROMPTS[name]["row"], "multi_turns": [{**PROMPTS[name]["row"]["multi_turns"][0], **vector["turn"]}]}
    if name == "scbench_mf":
        row["multi_turns"][0]["input"] = "The number is"
    if blank := vector["turn"]["answer"] == "":  # which no row may have, though the official scorer takes it
        row["multi_turns"][0]["answer"] = "x"
    (example,) = examples(write(**{name: [row]}), tasks=name)
    example = replace(example, references=("",)) if blank else example
    assert SCBench().score(example, vector["output"]).value == vector["score"]


def test_a_skill_has_an_average_where_all_its_tasks_ran() -> None:
    groups = dict.fromkeys(("scbench_kv", "scbench_prefix_suffix", "scbench_vt", "scbench_mf"), 0.5)
    assert SCBench().averages_of(groups) == {"string_retrieval": 0.5}


def test_long_contexts_are_cut_in_the_middle_and_stay_shared(write: Callable[..., Path]) -> None:
    row = {**PROMPTS["scbench_qa_eng"]["row"], "context": " ".join(f"word{i}" for i in range(600))}
    root = write(scbench_qa_eng=[row])
    made = examples(root, tasks="scbench_qa_eng", mode="multi_request", window=200)
    (context,) = {one.context for one in made}
    assert context.startswith("Read the book")
    assert context.endswith("word599")
    assert not re.search(r"\dword", context)  # the space at the cut
    text = Chat()
    for one in made:
        assert 150 < text.count(one.context + one.question) + one.max_new_tokens + 16 <= 201
        assert one.data["cut_tokens"] > 400
    (talk,) = examples(root, tasks="scbench_qa_eng", window=400)
    needed = sum(
        text.count(one.question, one.prefix) + len(text.encode(one.reply or "")) + 40 for one in talk.turns[1:]
    )
    assert talk.max_prompt_tokens == 400 - 40 - needed - 5 - 16
    assert examples(root, tasks="scbench_qa_eng", max_prompt_tokens=99)[0].max_prompt_tokens == 99
    with pytest.raises(TaskError, match=r"has no room for a context: lower task\.turns"):
        examples(root, tasks="scbench_qa_eng", window=90)
