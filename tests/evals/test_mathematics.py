"""Competition mathematics: files in the hub's layout, prompts, and verdicts on answers."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evals import mathematics
from evals.base import TaskEnv, TaskError
from evals.mathematics import SETS, Mathematics, judge, last_box

PAIRS = json.loads(Path(__file__).with_name("math_pairs.json").read_text())
needs_math_verify = pytest.mark.skipif(
    not mathematics.has_math_verify(), reason="math-verify is not installed: pip install 'kv-harness[math]'"
)


def env(root: Path) -> TaskEnv:
    return TaskEnv(text=cast(Any, None), seed=0, data_root=root)


ANSWERS: dict[str, tuple[Any, Any]] = {
    "math500": ("\\frac{1}{2}", "28\\%"), "aime24": ("204", "025"), "aime25": ("70", "588"), "aime26": (277, 62),
}  # fmt: skip


def write(root: Path) -> None:
    """Write two problems of every set, in the files of the hub's repositories."""
    for name, answers in ANSWERS.items():
        more = {"subject": "Algebra", "level": 5} if name == "math500" else {"id": 60, "url": "..."}
        rows = [{"problem": f"Problem {i} of {{x}}?", "answer": a, **more} for i, a in enumerate(answers)]
        path = root / SETS[name].repo.rpartition("/")[2] / SETS[name].file
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_set_is_read_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    write(tmp_path)
    task = Mathematics(sets=list(SETS))
    examples = list(task.examples(env(tmp_path)))
    assert [example.id for example in examples] == [f"{name}-{i}" for name in SETS for i in range(2)]
    assert [example.references for example in examples][-2:] == [("277",), ("62",)]
    assert [example.max_new_tokens for example in examples] == [16384] * 2 + [32768] * 6
    assert examples[0].data == {"subject": "Algebra", "level": 5}
    assert examples[0].context == (
        "Problem 0 of {x}?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    assert task.provenance()["aime24"]["origin"] == "local:aime_2024/data/train-00000-of-00001.parquet"
    assert [len(list(Mathematics(sets=name, samples=1).examples(env(tmp_path)))) for name in SETS] == [1] * 4
    (released,) = Mathematics(prompt="rkv", samples=1).examples(env(tmp_path))
    assert released.context.startswith("You are given a math problem.\n\nProblem: Problem 0 of {x}?\n\n You need")


def test_a_missing_judge_is_named_before_the_model_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", cast(Any, None))
    with pytest.raises(TaskError, match=r"kv-harness\[math\]"):
        Mathematics().require(tmp_path)


@needs_math_verify
def test_verdicts_are_those_written_by_hand() -> None:
    assert (len(PAIRS), sum(kind != "plain" for kind, *_ in PAIRS)) == (127, 47)
    wrong = [pair for pair in PAIRS if judge(pair[1], pair[2])[0] != pair[3]]
    assert not wrong


@needs_math_verify
@pytest.mark.parametrize(
    ("right", "output"),
    [
        ("1/2", "so \\boxed{0.5}"),
        ("5", "\\boxed{\ud800}"),
        # a comparison that only math-verify's alarm ends
        pytest.param("2", "\\boxed{9^{9^{9^9}}}", marks=pytest.mark.slow),
    ],
)
def test_a_verdict_in_a_thread_is_that_of_the_main_thread(right: str, output: str) -> None:
    with ThreadPoolExecutor(1) as thread:
        assert (
            thread.submit(judge, right, output).result() == judge(right, output) == (right == "1/2", last_box(output))
        )


@needs_math_verify
def test_a_score_says_what_was_taken_for_the_answer(tmp_path: Path) -> None:
    write(tmp_path)
    task = Mathematics()
    half, _ = task.examples(env(tmp_path))
    assert task.score(half, "so \\boxed{\\frac{2}{4}}").details == {"boxed_share": 1.0, "answer": "\\frac{2}{4}"}
    assert [task.score(half, text).value for text in ("\\boxed{0.5}", "\\boxed{2}", "The answer is 0.5")] == [1, 0, 1]
    assert task.averages({"math500": 0.5}, {"boxed_share": 0.75}) == {"mean": 0.5, "boxed_share": 0.75}
    assert last_box("\\boxed{" * 20_000) is None
    assert task.score(half, "\\boxed{0.5}, no, \\boxed{0.25").details == {"boxed_share": 0.0, "answer": ""}
