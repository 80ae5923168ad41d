"""Causes planted in a tiny random model: what Full answers counts as right."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import ref

import pytest

from evals.base import Example, Score, Task, TaskEnv
from evals.niah import Niah
from harness.config.settings import GenerationSettings, Results, Settings, SettingsError
from harness.diagnosis.ladder import cause
from harness.engine import attach
from harness.jobs import loading
from harness.jobs import triage as triage_job
from harness.jobs.evaluate import evaluate
from harness.jobs.planning.items import prepare
from harness.jobs.triage import WrongAnswer
from harness.models.embedded import SmolLM2
from harness.results import triage
from harness.results.files import read_json
from harness.results.folder.names import TRIAGED
from harness.results.records import StoreError
from harness.results.run_folder import StoredRun, load
from methods.base import Method
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.infllm import InfLLM
from methods.oracle import Oracle
from tests import fast
from tests.fake_records import record
from tests.fast import MODEL, PQ, STREAMING, niah

NUMBER = "7654321"


@dataclass(frozen=True)
class Planted(Task):
    """`right`: the output that counts. The needle is the whole text, so that it is all that matters, unless it is
    `short`. `cut`: prompt tokens that are left, half of them from either end."""

    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "same as Full"

    right: str = "?"
    short: bool = False
    cut: int | None = None
    new_tokens: int = 12
    stop: tuple[str, ...] = ()

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        filler = [" ".join(f"{(7 * i * i + k) % 89:02d}" for i in range(80)) for k in range(2)]
        needle = f"key {NUMBER}" if self.short else f"{filler[0]} {NUMBER} {filler[1]}"
        ends = (filler[0], filler[1]) if self.short else ("", "")
        yield Example(
            id="planted",
            group="planted",
            context=f"{ends[0]}\n{needle}\n{ends[1]}",
            question="\nkey?",
            references=(NUMBER,),
            max_new_tokens=self.new_tokens,
            max_prompt_tokens=self.cut,
            chat=False,
            stop=self.stop,
            data={"needle": needle},
        )

    def score(self, example: Example, output: str) -> Score:
        return Score(float(output.startswith(self.right)))


def run(folder: Path, method: Method, task: Planted, budget: float = 0.2, **changes: Any) -> StoredRun:
    return fast.run(folder, method, task, budget=budget, **changes)


def knowing(folder: Path, task: Planted | None = None, tokens: int = 8, **changes: Any) -> Planted:
    """The task with the first `tokens` of Full's answer as the right one."""
    task = task or Planted()
    full = run(folder / "full", Full(), replace(task, new_tokens=tokens), **changes)
    return replace(task, right=full.records[0].output)


def only(made: StoredRun) -> dict[str, Any]:
    (line,) = load(made.folder).triaged
    return line


@pytest.mark.parametrize("protocol", ["prompt", "context"])
def test_an_evicted_needle_is_told_from_one_that_was_not_selected(tmp_path: Path, protocol: str) -> None:
    task = knowing(tmp_path, protocol=protocol)
    for method, name in ((STREAMING, "evicted"), (H2O(), "evicted"), (PQ, "not_selected")):
        made = run(tmp_path, method, task, triage="on", protocol=protocol)
        assert made.records[0].score == 0, "choose another text: this one needs no needle"
        line = only(made)
        assert line["cause"] == name, type(method).__name__
        assert (line["score"], line["full_score"], line["scores"]["needle"]) == (0, 1, 1)
        assert line["repeated"]
        assert max(map(max, line["held"])) < 0.9
        assert made.summary["triage"]["causes"] == {name: 1}


def test_a_method_that_reads_everything_leaves_the_blame_to_the_model(tmp_path: Path) -> None:
    for method in (Full(), PQ, STREAMING):
        made = run(tmp_path, method, Planted(right="no such answer"), budget=1.0, triage="on")
        line = only(made)
        assert line["cause"] == "model"
        assert line["full_score"] == 0
        assert {share for row in line["held"] for share in row} == {1}
        assert line["mass"] == line["full_mass"]
        assert line["departs"] is None


def test_a_needle_outside_a_truncated_prompt_is_said_to_be_cut(tmp_path: Path) -> None:
    made = run(tmp_path, PQ, Planted(short=True, cut=200), triage="on")
    answer = made.records[0].answer_sha256
    cut = {"id": "planted", "score": 0.0, "answers": [NUMBER], "cause": "not_in_prompt", "answer": answer}
    assert only(made) == cut


def test_other_tokens_than_the_needle_may_be_what_is_missing(tmp_path: Path) -> None:
    task = knowing(tmp_path, Planted(short=True))
    line = only(run(tmp_path, STREAMING, task, triage="on"))
    assert line["cause"] == "context"
    assert line["scores"] == {"own": 0, "exact": 0, "needle": 0}


def test_a_sparse_prefill_is_blamed_where_the_whole_prompt_would_not_help(tmp_path: Path) -> None:
    task = knowing(tmp_path)
    line = only(run(tmp_path, InfLLM(n_init=4, block=8), task, triage="on"))
    assert line["cause"] == "prefill"
    assert line["scores"].keys() == {"own", "exact", "needle", "all"}


def test_an_answer_that_more_tokens_would_have_brought(tmp_path: Path) -> None:
    task = knowing(tmp_path)
    line = only(run(tmp_path, Full(), replace(task, new_tokens=3), triage="on"))
    assert line["cause"] == "token_limit"


def test_an_answer_that_the_scorer_does_not_see() -> None:
    """Nothing is run for it."""
    item = prepare(niah(), MODEL, Settings())[0]
    (answer,) = item.example.references
    alone: Any = SimpleNamespace(loaded=SimpleNamespace(tokenizer=MODEL.tokenizer()))
    for output, name in ((f"It is {answer[:1]},{answer[1:4]},{answer[4:]}.", "format"), ("", None)):
        wrong = record(item.example.id, score=0.0, output=output)
        assert WrongAnswer(alone, SimpleNamespace(), item, wrong).seen() == name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scores", "evicts", "dense", "name"),
    [
        ({"own": 1.0}, True, True, "not_repeated"),
        ({"own": 0, "exact": 1}, True, True, "approximation"),
        ({"own": 0, "exact": 0.5, "needle": 1}, False, True, "not_selected"),
        ({"own": 0, "exact": 0, "needle": 1}, True, False, "evicted"),
        ({"own": 0, "exact": 0, "needle": 0.5}, False, True, "context"),
        ({"own": 0, "exact": 0, "needle": 0, "all": 1}, False, False, "context"),
        ({"own": 0, "exact": 0, "needle": 0, "all": 0}, False, False, "prefill"),
    ],
)
def test_the_first_rung_that_helps_names_the_cause(
    scores: dict[Any, float], evicts: bool, dense: bool, name: str
) -> None:
    assert cause(0, 1, scores.__getitem__, evicts=evicts, dense_prefill=dense) == (name, scores)
    assert name in triage.CAUSES


def test_full_that_is_no_better_is_not_climbed_for() -> None:
    assert cause(0.5, 0.5, {}.__getitem__, evicts=True, dense_prefill=True) == ("model", {})


def test_triage_changes_no_record_and_is_taken_up_again(tmp_path: Path) -> None:
    task = knowing(tmp_path)
    plain = run(tmp_path, PQ, task)
    before = (plain.folder / "examples.jsonl").read_bytes()
    assert plain.summary["triage"] is None
    traced = run(tmp_path, PQ, task, triage="on")
    assert traced.folder == plain.folder
    assert (plain.folder / "examples.jsonl").read_bytes() == before
    lines = (plain.folder / TRIAGED).read_bytes()
    assert run(tmp_path, PQ, task, triage="on").folder == plain.folder
    assert (plain.folder / TRIAGED).read_bytes() == lines
    (plain.folder / TRIAGED).write_bytes(lines[:-20])  # killed while it wrote
    run(tmp_path, PQ, task, triage="on")
    assert (plain.folder / TRIAGED).read_bytes() == lines
    assert read_json(plain.folder / "summary.json")["triage"]["wrong"] == 1


def test_a_method_that_prepares_itself_is_followed_in_a_fresh_process(tmp_path: Path) -> None:
    """What it made of the model is gone then, and is made again on a calibration text."""
    task, method = knowing(tmp_path), InfiniGen(dense_layers=(0,), alpha=0.1)
    wrong = run(tmp_path, method, task)
    assert wrong.records[0].score == 0, "choose another text: this one needs no needle"
    attach._prepared.clear()
    assert only(run(tmp_path, method, task, triage="on"))["repeated"]


def test_fulls_answers_are_known_as_long_as_their_model_is_there(tmp_path: Path) -> None:
    """A model that is loaded later may lie where this one lay.

    Other tests of this process may still hold models of theirs: only the one that is loaded here counts.
    """
    loading._loaded.clear()
    others = set(triage_job._full_answers)
    run(tmp_path, PQ, Planted(right="no such answer"), triage="on")
    (model,) = set(triage_job._full_answers) - others
    assert len(triage_job._full_answers[model]) == 1
    left = ref(model)
    loading._loaded.clear()
    del model
    gc.collect()
    assert left() is None
    assert set(triage_job._full_answers) <= others


def test_fulls_answer_under_another_stop_is_another_answer(tmp_path: Path) -> None:
    """Of the same prompt, in one command."""
    task = Planted(right="no such answer")
    said = run(tmp_path / "full", Full(), task).records[0].output
    whole, cut = (only(run(tmp_path, PQ, replace(task, stop=stop), triage="on")) for stop in ((), (said[2],)))
    assert len(cut["full_mass"][0]) < len(whole["full_mass"][0]) == task.new_tokens - 1


def test_right_answers_are_left_alone(tmp_path: Path) -> None:
    made = run(tmp_path, Full(), knowing(tmp_path), triage="on")
    assert made.records[0].score == 1
    assert not (made.folder / TRIAGED).exists()
    assert made.summary["triage"] is None


def test_a_changed_line_is_refused(tmp_path: Path) -> None:
    made = run(tmp_path, Oracle(), knowing(tmp_path), triage="on")
    file = made.folder / TRIAGED
    file.write_text(file.read_text().replace('"score":0.0', '"score":0.5'))
    with pytest.raises(StoreError, match="changed after it was written"):
        load(made.folder)


def test_sampling_cannot_be_given_again() -> None:
    with pytest.raises(SettingsError, match="needs greedy decoding"):
        Settings(triage="on", generation=GenerationSettings(temperature=0.7))


@pytest.mark.slow
def test_a_real_model_loses_a_needle_in_the_middle_to_streaming(tmp_path: Path) -> None:
    settings = Settings(results=Results(root=str(tmp_path)), progress=False, budget=0.2, warmup=0, triage="on")
    made = evaluate(STREAMING, Niah(lengths=[512], depths=[50]), SmolLM2(), settings)
    line = only(made)
    assert (line["cause"], line["full_score"], line["scores"]["exact"]) == ("evicted", 1, 0)
    assert {share for row in line["held"] for share in row} == {0}
