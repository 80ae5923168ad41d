"""MRCR: scores against the dataset card's, conversations in the chat template, rows that fit the window.

mrcr_vectors.json holds outputs and answers made up here, with the scores that the card's function gives them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from evals import mrcr
from evals.base import Example, TaskEnv, TaskError
from evals.mrcr import Mrcr, grade
from harness.models.random import byte_tokenizer
from harness.prompts.prompt import PromptError, Tools, render
from harness.prompts.prompt_lint import lint

OFFICIAL: dict[str, Any] = json.loads(Path(__file__).with_name("mrcr_vectors.json").read_text(encoding="utf-8"))
HASH = OFFICIAL["prepended"]
TALK = [
    ("user", "Write a poem about tapirs"), ("assistant", " A tapir.\n"), ("user", "Write a poem about tapirs"),
    ("assistant", "Tapirs!"), ("user", f"Prepend {HASH} to the 2nd (1 indexed) poem about tapirs."),
]  # fmt: skip


def row(pairs: list[tuple[str, str]] | None = None, **changes: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": content} for role, content in pairs or TALK]
    known = {"prompt": json.dumps(messages), "answer": f"{HASH}Tapirs!", "random_string_to_prepend": HASH}
    return known | {"n_needles": 2, "desired_msg_index": 3, "total_messages": 5, "n_chars": 9} | changes


def write(root: Path, **rows: list[dict[str, Any]]) -> Path:
    """Write the hub's six files, with these rows in the files named and one row in the others."""
    for needles in (2, 4, 8):
        for part in (0, 1):
            name = f"{needles}needle_{part}"
            path = root / "mrcr" / f"{needles}needle" / f"{name}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(rows.get(name, [row()])), path)
    return root


def examples(root: Path, window: int | None = None, chat: Any = "template", **changes: Any) -> list[Example]:
    env = TaskEnv(text=Tools(byte_tokenizer(), chat), seed=0, data_root=root, window=window)
    return list(Mrcr(**changes).examples(env))


def test_scores_are_the_official_ones(tmp_path: Path) -> None:
    for output, answer, score in OFFICIAL["scores"]:
        assert grade(output, answer, HASH) == score
    task, (first, *_) = Mrcr(), examples(write(tmp_path))
    assert task.score(first, f"{HASH}Tapirs!") == mrcr.Score(1.0, {"prepended_share": 1.0})
    assert task.score(first, "Tapirs!") == mrcr.Score(0.0, {"prepended_share": 0.0})
    averages = task.averages({"2needle/4096-8192": 0.5, "2needle/8192-16384": 0.1, "4needle/4096-8192": 0.3})
    assert averages == pytest.approx({"mean": 0.3, "2needle": 0.3, "4needle": 0.3})


@pytest.mark.parametrize("system", [[], [("system", "Be brief.")]])
def test_the_prompt_is_the_conversation_in_the_chat_template(tmp_path: Path, system: list[tuple[str, str]]) -> None:
    asked = row([*system, *TALK])
    (example,) = examples(write(tmp_path, **{"2needle_0": [asked]}), needles=[2], samples=1)
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    prompt = render(example, tokenizer, chat="template")
    text = tokenizer.apply_chat_template(json.loads(asked["prompt"]), add_generation_prompt=True, tokenize=False)
    assert prompt.ids == tuple(tokenizer(text)["input_ids"])
    question = tokenizer.decode(prompt.ids[prompt.split :])
    assert question.startswith(f"Prepend {HASH}")  # the context is all before it
    assert list(lint(example, prompt, tokenizer, 8192, 8)) == []
    with pytest.raises(PromptError, match="set chat=template"):
        examples(tmp_path, chat="none")


def test_rows_that_fit_the_window_are_asked(tmp_path: Path) -> None:
    long = row([("user", "x" * 9000), *TALK[1:]])
    root = write(tmp_path, **{"2needle_0": [long, row(), row()], "2needle_1": [row(), long]})
    task = Mrcr(needles=[2])
    env = TaskEnv(text=Tools(byte_tokenizer(), "template"), seed=0, data_root=root, window=3000)
    assert [example.id for example in task.examples(env)] == ["2needle_0-1", "2needle_0-2", "2needle_1-0"]
    assert task.provenance()["2needle_1"]["rows"] == 2
    assert task.provenance()["2needle_1"]["fitting_rows"] == 1
    assert [example.id for example in examples(root, needles=[2], samples=1)] == ["2needle_0-0", "2needle_0-1"]
    assert {example.group for example in examples(root)} == {
        "2needle/8192-16384", "2needle/4096-8192", "4needle/4096-8192", "8needle/4096-8192",
    }  # fmt: skip
    whole = len(render(examples(root, 3000)[0], byte_tokenizer(), chat="template").ids)
    assert len(examples(root, whole + 8 + 16, needles=[4], max_new_tokens=8)) == 2
    with pytest.raises(TaskError, match="no row of MRCR fits"):
        examples(root, whole + 8 + 15, needles=[4], max_new_tokens=8)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    for wrong, named in ((row(TALK[:2]), "no conversation"), (row(TALK[1:]), "no conversation"), (row(prompt="["), "")):
        with pytest.raises(TaskError, match=rf"2needle_0: row 1 of .*{named}"):
            examples(write(tmp_path, **{"2needle_0": [wrong]}))
