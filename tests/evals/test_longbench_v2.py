"""LongBench v2: prompts, cut, reading and result table against the official code's.

longbench_v2_vectors.json holds rows and outputs made up here, with the requests, letters and numbers that the official
code makes of them (`source` names its commit).
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import pytest

from evals.base import Example, TaskEnv, TaskError
from evals.longbench_v2 import LongBenchV2, extract
from harness.prompts.prompt import cut_middle
from tests.evals.counting import Bytes, Words

OFFICIAL: dict[str, Any] = json.loads(Path(__file__).with_name("longbench_v2_vectors.json").read_text(encoding="utf-8"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(tmp_path, OFFICIAL["rows"])


def write(root: Path, rows: list[dict[str, Any]]) -> Path:
    (root / "LongBench-v2").mkdir(exist_ok=True)
    (root / "LongBench-v2" / "data.json").write_text(json.dumps(rows), encoding="utf-8")
    return root


def examples(root: Path, window: int | None = None, **changes: Any) -> list[Example]:
    env = TaskEnv(text=Words(), seed=0, data_root=root, window=window)
    return list(LongBenchV2(**changes).examples(env))


def requests(asked: list[Example]) -> list[list[Any]]:
    texts = [cut_middle(example, cast(Any, Bytes())) for example in asked]
    return [[context + question, ex.max_new_tokens] for ex, (context, question, _) in zip(asked, texts, strict=True)]


def test_prompts_are_the_official_requests(root: Path, tmp_path: Path) -> None:
    for prompt in ("0shot", "0shot_cot", "0shot_no_context"):
        assert requests(examples(root, prompt=prompt)) == OFFICIAL["prompts"][prompt]
    cut = examples(root, max_prompt_tokens=300, samples=2)
    assert requests(cut) == OFFICIAL["prompts"]["cut_at_300_bytes"]
    pairs = zip(OFFICIAL["rows"], OFFICIAL["thoughts"], strict=True)
    (marked,) = examples(write(root, [OFFICIAL["rows"][0] | {"context": "What $COT$ costs"}]))
    assert marked.context.endswith("What $COT$ costs")
    write(root, OFFICIAL["rows"])
    lines = [json.dumps({"id": row["_id"], "output": thought}) for row, thought in pairs]
    run = tmp_path / "run"
    run.mkdir()
    (run / "examples.jsonl").write_text("\n".join(lines), encoding="utf-8")
    answered = {"prompt": "0shot_cot_ans", "reasoning": str(run)}
    assert requests(examples(root, **answered)) == OFFICIAL["prompts"]["0shot_cot_ans"]
    (run / "examples.jsonl").write_text(lines[0], encoding="utf-8")
    with pytest.raises(TaskError, match="has no output for r1: finish that run first"):
        examples(root, **answered)
    with pytest.raises(TaskError, match="is no folder of a run"):
        examples(root, **answered | {"reasoning": str(root)})


@pytest.mark.parametrize("strips", [False, True])
def test_a_cut_prompt_is_one_text_as_officially(root: Path, strips: bool) -> None:
    """Also at odd limits, and where the cut goes through a space or a character."""
    (long,) = examples(write(root, [OFFICIAL["rows"][0] | {"context": "a b 编译器 " * 99}]))
    tokenizer, text = Bytes(strips=strips), long.context + long.question
    ids = tokenizer.encode(text)
    for limit in range(800, 830):
        cut = cut_middle(replace(long, max_prompt_tokens=limit), cast(Any, tokenizer))
        assert cut[0] + cut[1] == tokenizer.decode(ids[: limit // 2] + ids[-limit // 2 :])
        assert cut[1:] == (long.question, len(ids) - limit)


def test_letters_and_the_result_table_are_the_official_ones(root: Path) -> None:
    assert [[output, extract(output)] for output, _ in OFFICIAL["letters"]] == OFFICIAL["letters"]
    task, values, details = LongBenchV2(), list[float](), defaultdict[str, list[float]](list)
    for example, output in zip(examples(root), OFFICIAL["outputs"], strict=True):
        score = task.score(example, output)
        values.append(score.value)
        for name, value in score.details.items():
            if isinstance(value, float):
                details[name].append(value)
    averages = task.averages({"longbench_v2": fmean(values)}, {name: fmean(v) for name, v in details.items()})
    table = {name.replace("mean", "overall"): round(100 * value, 1) for name, value in averages.items()}
    assert table.pop("extracted_share") == 80.0
    assert table == OFFICIAL["table"]
    assert task.score(examples(root)[0], "none").details == {
        "easy": 0.0, "short": 0.0, "extracted_share": 0.0, "answer": "",
    }  # fmt: skip


def test_the_document_is_the_context_and_the_window_leaves_room(root: Path) -> None:
    first, *_ = examples(root, window=300_000)
    assert first.context.endswith(" in it.")
    assert first.question.startswith("\n</text>\n\nWhat is the correct answer")
    assert (first.max_prompt_tokens, examples(root)[0].max_prompt_tokens) == (120_000, 120_000)
    assert examples(root, window=2000, prompt="0shot_cot")[0].max_prompt_tokens == 2000 - 1024 - 16
    assert [example.id for example in examples(root, lengths=["long", "short"], samples=2)] == ["r0", "r2"]
    with pytest.raises(TaskError, match="window of 140 tokens is too small"):
        examples(root, window=140)


def test_wrong_parameters_and_rows_are_named(root: Path, tmp_path: Path) -> None:
    for wrong in ({"answer": "E"}, {"difficulty": "Easy"}, {"length": "longer"}):
        (key, value), place = *wrong.items(), r"row r0 of local:LongBench-v2/data\.json"
        with pytest.raises(TaskError, match=f"{place} has {key}='{value}', not "):
            examples(write(tmp_path, [OFFICIAL["rows"][0] | wrong]), samples=1)
