"""Conversations from task to table: likelihoods of forced replies, facts by turn, requests on one context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.base import Task
from evals.multiturn import Multiturn
from evals.scbench import SCBench
from harness.config.settings import Data, Settings
from harness.jobs.examples import prepare
from harness.models.base import load
from harness.reports.compare import comparisons
from harness.reports.groups import ago_scores, turn_scores
from harness.results.run_folder import StoredRun
from harness.results.run_folder import load as load_run
from methods.base import Method
from methods.full import Full
from tests import fast
from tests.evals.test_scbench import PROMPTS
from tests.fast import MODEL, PQ

SHORT: dict[str, Any] = {"conversations": 2, "turns": 3, "longest": 2000, "opening": 100, "haystack": "pydoc"}


def run(root: Path, task: Task, method: Method, **changes: Any) -> StoredRun:
    return fast.run(root, method, task, **{"budget": 0.4} | changes)


def test_forced_replies_have_the_likelihood_of_the_whole_text(tmp_path: Path) -> None:
    task = Multiturn(**SHORT, replies="forced")
    finished = run(tmp_path, task, Full())
    model = load(MODEL, "fp32", "cpu").model
    for record, item in zip(finished.records, prepare(task, MODEL, Settings()), strict=True):
        ids = [token for turn in item.turns for token in (*turn.prompt.ids, *turn.forced)]
        with torch.inference_mode():
            costs = -model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        end = 0
        for turn, asked in zip(record.turns or (), item.turns, strict=True):
            start, end = end + len(asked.prompt.ids), end + len(asked.prompt.ids) + len(asked.forced)
            wanted = costs[range(start - 1, end - 1), ids[start:end]].mean().item()
            assert turn.details["nll"] == pytest.approx(wanted, abs=1e-4)
            assert turn.stop == "forced"
    assert finished.summary["score"]["averages"]["perplexity"] > 1


@pytest.mark.parametrize("replies", ["own", "given"])
def test_a_table_shows_the_score_by_turn_and_by_turns_ago(tmp_path: Path, replies: str) -> None:
    finished = run(tmp_path, Multiturn(**SHORT, replies=replies, about="first", max_new_tokens=4), PQ)
    assert {name: row["n"] for name, row in finished.summary["turns"].items()} == {"1": 2, "2": 2, "3": 2}
    assert {name: row["n"] for name, row in finished.summary["turns_ago"].items()} == {"0": 2, "1": 2, "2": 2}
    info = json.loads((finished.folder / "run.json").read_text())["task_info"]
    assert info["metric"] == "needle found"
    assert info["statistics"]["turns"] == 6
    [table] = comparisons([load_run(finished.folder)])
    heads = [[column.head for column in columns(table)[2:]] for columns in (turn_scores, ago_scores)]
    assert heads == [["turn 1", "turn 2", "turn 3"], ["0", "1", "2"]]


@pytest.mark.parametrize(
    "changes",
    [{"task": {}}, {"task": {"mode": "multi_request"}, "protocol": "context", "questions": "shared"}],
    ids=["multi_turn", "multi_request"],
)
def test_scbench_runs_in_both_modes(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "scbench").mkdir()
    row = PROMPTS["scbench_kv"]["row"]
    lines = [row, {**row, "context": row["context"] * 2}]
    (tmp_path / "scbench" / "scbench_kv.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = SCBench(tasks="scbench_kv", **changes.pop("task"))
    finished = run(tmp_path / "runs", task, Full(), data=Data(str(tmp_path)), **changes)
    assert finished.summary["prefills"] == 2
    if task.mode == "multi_turn":
        assert [len(record.turns or ()) for record in finished.records] == [2, 2]
    else:
        assert [record["prefilled_by"] for record in finished.records] == [
            None,
            "scbench_kv/0/0",
            None,
            "scbench_kv/1/0",
        ]
        assert {record["unit"] for record in finished.records} == {"scbench_kv/0", "scbench_kv/1"}


@pytest.mark.tokens
def test_given_replies_are_the_same_with_a_store(tmp_path: Path) -> None:
    """What is put back behind an answer is what the store keeps."""
    task = Multiturn(**SHORT, replies="given", max_new_tokens=4)
    runs = [run(tmp_path, task, Full(), history=history) for history in ("device_prefix", "store", "recompute")]
    tokens = [[[turn.tokens for turn in record.turns or ()] for record in finished.records] for finished in runs]
    assert tokens[0] == tokens[1] == tokens[2]
    assert [len(turns) for turns in tokens[1]] == [3, 3]
    assert all(turn["reused_tokens"] for record in runs[1].records for turn in (record.turns or ())[1:])
