"""The likelihood of the right answer: what one forward says it is, and a run that is otherwise the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.base import Example, Task, TaskEnv
from evals.niah import Niah
from harness.config.settings import GenerationSettings, Settings
from harness.jobs.examples import PreparedExample, prepare
from harness.models.base import load
from harness.prompts.teacher import answer_ids
from harness.results.facts import FACTS
from harness.results.run_folder import StoredRun
from methods.base import Method
from methods.full import Full
from tests import fast
from tests.fast import MODEL, PQ, niah
from tests.harness.jobs.test_questions import STATEFUL, Balances, Given
from tests.methods.test_contract import small
from tests.quick import mostly_slow

TIMES = {"token_s", *(key for key, fact in FACTS.items() if fact.unit in ("nats", "seconds"))}
MEMORY = {"device_peak_bytes", "host_peak_bytes", "peaks"}


def run(root: Path, method: Method, task: Task | None = None, **changes: Any) -> StoredRun:
    return fast.run(root, method, task or niah(depths=2), **{"budget": 0.3} | changes)


def seen(line: dict[str, Any]) -> dict[str, Any]:
    """What a line holds of an answer, but for clocks, the process' peaks and what is new."""
    plain = {name: value for name, value in line.items() if name not in TIMES | MEMORY}
    return plain | {"turns": [seen(turn) for turn in line.get("turns") or ()]}


def nll_of(replies: Any) -> list[float | None]:
    return [reply["answer_nll"] for reply in replies]


def same_but_for_the_likelihood(root: Path, method: Method, task: Task | None = None, **changes: Any) -> StoredRun:
    without = run(root / "without", method, task, likelihood="off", **changes)
    made = run(root / "with", method, task, **changes)
    assert [seen(json.loads(record.to_json())) for record in made.records] == [
        seen(json.loads(record.to_json())) for record in without.records
    ]
    assert not any(nll_of(without.records))
    assert all(nll_of(reply for record in made.records for reply in record.replies))
    return made


def dense(item: PreparedExample, protocol: str = "prompt") -> float:
    """The cost of the first reference by one forward over everything; under protocol=prompt without its first token."""
    model, [reference] = load(MODEL, "fp32", "cpu").model, item.example.references
    answer = answer_ids(reference, item.prompt, MODEL.tokenizer())[: item.new_tokens]
    ids = torch.tensor([[*item.prompt.ids, *answer]])
    skipped = len(item.prompt.ids) + (protocol == "prompt")
    with torch.inference_mode():
        logits = model(ids).logits[0, skipped - 1 : -1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, skipped:]).item()


@pytest.mark.tokens
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("protocol", ["prompt", "context"])
def test_under_full_it_is_that_of_one_forward(tmp_path: Path, protocol: str, batch: int) -> None:
    made = run(tmp_path, Full(), protocol=protocol, batch=batch)
    wanted = [dense(item, protocol) for item in prepare(niah(depths=2), MODEL, Settings())]
    assert nll_of(made.records) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("name", mostly_slow(STATEFUL, "infinigen", "pqcache"))
def test_what_steps_leave_behind_is_taken_back(name: str, tmp_path: Path) -> None:
    method: Method = replace(small(name), **STATEFUL[name])  # type: ignore[type-var]
    same_but_for_the_likelihood(tmp_path, method, placement="host" if method.offloads else "device")


HOW: dict[str, dict[str, Any]] = {
    "side by side": {"batch": 2},
    "with exact attention beside it": {"fidelity": 1},
    "one prefill": {"shared_prefill": True},
    "a further turn": {"task": Balances(talks=True)},
    "a given reply": {"task": Given()},
    "a question of its own": {"protocol": "context"},
    "a shared context": {"task": Balances(), "protocol": "context", "questions": "shared"},
    "from the host": {"placement": "host"},
    "in a store": {"task": Balances(talks=True), "history": "store"},
}


@pytest.mark.parametrize("how", HOW)
def test_a_run_is_otherwise_the_same_however_it_runs(how: str, tmp_path: Path) -> None:
    same_but_for_the_likelihood(tmp_path, PQ, **HOW[how])


@dataclass(frozen=True)
class Answered(Niah):
    """A needle whose references are given, one less in each further prompt."""

    answers: tuple[str, ...] = ("4", "one", "another")

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        for number, example in enumerate(super().examples(env)):
            yield replace(example, references=self.answers[number:])


@pytest.mark.tokens
def test_the_best_of_several_counts_and_one_token_has_none(tmp_path: Path) -> None:
    """Side by side, answers end at different steps."""
    short = {"lengths": (400,), "depths": 2, "max_new_tokens": 6, "template": "{context}\n\n{question}\n"}
    items = prepare(task := Answered(**short), MODEL, Settings())
    costs = [
        min(dense(replace(item, example=replace(item.example, references=(one,)))) for one in task.answers[1:])
        for item in items
    ]
    assert nll_of(run(tmp_path, Full(), task, batch=2).records) == pytest.approx(costs, abs=1e-4)
    one = Answered(**short | {"depths": 1}, answers=("4",))
    assert nll_of(run(tmp_path, Full(), one).records) == [None]


@pytest.mark.parametrize("changes", [{"trace": "on"}, {"generation": GenerationSettings(force_length=True)}], ids=str)
def test_a_run_about_time_measures_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert nll_of(run(tmp_path, PQ, niah(depths=1), **changes).records) == [None]


def test_it_is_no_part_of_the_identity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "on", PQ).folder.name == run(tmp_path / "off", PQ, likelihood="off").folder.name
    assert "likelihood" not in capsys.readouterr().err
    assert nll_of(run(tmp_path / "off", PQ).records) == [None, None]
    assert "likelihood=off" in capsys.readouterr().err  # how to measure it
