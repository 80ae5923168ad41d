"""Every task's score, whatever a model puts out: pure, within [0, 1], and never an exception."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.base import Example, Task
from evals.longbench_tables import DATASETS
from evals.scbench import LISTS
from evals.scbench.scoring import SCORERS
from harness.config import plugins
from harness.config.catalogue import entries

CLASSES = ["Date", "City", "Other location", "a.*", ""]
REFERENCES = {"gsm8k": ("42",), "passage_retrieval_en": ("Paragraph 7",), "passage_retrieval_zh": ("段落7",)}
REFERENCES |= {name: ("7",) for name in SCORERS if name not in LISTS}
NASTY = [
    "", " ", "\n", ".", "...", "\x00\x1f", "\ud7ff", "é" * 50, "日本語。" * 20, "�", "-1e999", "NaN", "7" * 5000,
    "(" * 900, "\\", "[a-z]+(", "Paragraph", "The answer is ", "####", "Question: ", "#\n" * 999, "`//",
    "word " * 30_000, "x" * 200_000,
]  # fmt: skip


def cases() -> list[Any]:
    found = []
    for entry in entries("task"):
        values = {key: value for key, value, _ in entry.parameters()}
        task: Task = plugins.build({"_target_": entry.target} | values, "task")
        for name, data in sorted(kinds(entry.name).items()):
            references = REFERENCES.get(entry.name) or REFERENCES.get(name, ("Date", "7", ""))
            example = Example(
                id="e", group="g", context="c", references=references, max_new_tokens=9, data=data, stop=("\n",)
            )
            found.append(pytest.param(task, example, id=f"{entry.name}-{name}"))
    return found


def kinds(task: str) -> dict[str, dict[str, Any]]:
    """`Example.data` of each kind of scoring that a task has."""
    if task == "longbench":
        names = [name for name in DATASETS if find_spec("jieba") or "_zh" not in DATASETS[name].metric]
        return {name: {"dataset": name, "all_classes": CLASSES} for name in names}
    if task == "scbench":
        return {name: {"task": name} for name in SCORERS}
    if task == "ruler":
        return {name: {"task": name} for name in ("niah_single_2", "qa_1", "vt")}
    # the output of wikitext2 is the harness' own number, and tests/evals/test_lm_eval.py has tasks of lm-eval
    return {} if task in ("wikitext2", "lm_eval") else {"all": {"depth": 0}}


@pytest.mark.parametrize(("task", "example"), cases())
def test_any_output_has_one_score_within_bounds(task: Task, example: Example) -> None:
    def check(output: str) -> None:
        score = task.score(example, output)
        assert 0.0 <= score.value <= 1.0
        assert score == task.score(example, output)

    for output in NASTY:
        check(output)
    given(st.text())(settings(max_examples=25, deadline=None, database=None)(check))()
