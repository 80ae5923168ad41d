"""A run end to end: one folder per identity, nothing lost, nothing repeated, Full beside it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import yaml

from evals.base import Score
from evals.longbench import LongBench
from harness.config.settings import Data, GenerationSettings, Results, Settings, SettingsError
from harness.jobs.evaluate import evaluate, evaluate_together
from harness.jobs.job import Job
from harness.jobs.runner import Runner
from harness.models.devices import DeviceError
from harness.results.files import read_json
from harness.results.lock import is_locked
from harness.results.records import StoreError
from harness.results.run_folder import StoredRun
from methods.base import AttnInput
from methods.full import Full
from methods.infllm import InfLLM
from methods.lm_infinite import LMInfinite
from methods.oracle import Oracle
from methods.snapkv import SnapKV
from methods.streaming import Streaming, StreamingKeep
from tests import forks
from tests.failures import third_record_fails
from tests.fake_records import rewrite
from tests.fast import MODEL, MODEL_ARGS, PQ, STREAMING, TASK_ARGS, niah
from tests.forks import Forked
from tests.quick import mostly_slow

both = pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])


def run(folder: Path, method: Any = PQ, **changes: Any) -> StoredRun:
    task = changes.pop("task", niah())
    results = Results(root=str(folder), save_prompts=changes.pop("save_prompts", False))
    return evaluate(method, task, MODEL, Settings(results=results), **changes)


def without_times(evaluation: StoredRun) -> list[Any]:
    times = ("seal_s", "question_s", "share_s", "decode_share_s", "device_peak_bytes", "host_peak_bytes", "peaks")
    timed = {"token_s": []} | dict.fromkeys(times)
    return [json.loads(record.to_json()) | timed for record in evaluation.records]


def test_a_run_holds_everything_a_table_needs(tmp_path: Path) -> None:
    finished = run(tmp_path, budget=0.2, placement="host", save_prompts=True)
    assert [record.id for record in finished.records] == [f"magic_city/400/{d}/0" for d in ("0", "33.3", "66.7", "100")]
    for record in finished.records:
        assert record.prompt_tokens == len(record["prompt_ids"] or []) <= 400
        assert record["attended_prompt"] == int(0.2 * record.prompt_tokens)
        assert record["kv_host_bytes"] > 0
        assert record["moved_bytes_per_step"]
        assert record["sealed"]
        assert len(record.token_s) == len(record.tokens)
    summary = finished.summary
    assert (summary["status"], summary["method"], summary["placement"]) == ("complete", "pqcache", "host")
    assert (summary["budget"]["asked"], summary["full"] is None) == (0.2, False)
    names = {path.name for path in finished.folder.iterdir()}
    assert names >= {"config.yaml", "run.json", "examples.jsonl", "summary.json"}


@both
def test_the_same_call_again_generates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    first = run(tmp_path, shared_prefill=shared)

    def refuse(*arguments: object) -> None:
        raise AssertionError("the model was loaded again")

    monkeypatch.setattr("harness.jobs.job.load", refuse)
    again = run(tmp_path, shared_prefill=shared)
    assert again == first


def test_what_does_not_apply_is_no_part_of_the_identity(tmp_path: Path) -> None:
    one = run(tmp_path, Full(), budget=0.1)
    two = run(tmp_path, Full(), budget=300, placement="host")
    assert one.folder == two.folder
    assert yaml.safe_load((one.folder / "config.yaml").read_text())["budget"] is None
    shapes = ((PQ, niah(), 0.1), (PQ, niah(), 0.3), (replace(PQ, m=4), niah(), 0.1), (PQ, niah(depths=3), 0.1))
    jobs = [Job.plan(method, task, MODEL, settings(tmp_path, budget=budget)) for method, task, budget in shapes]
    assert len({job.folder for job in jobs}) == 4


def test_corrected_answers_are_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that was touched, or whose lines are laid out otherwise, holds the same data."""
    monkeypatch.setattr(LongBench, "score", lambda self, example, output: Score(float("Rome" in example.references)))
    file = tmp_path / "data" / "longbench" / "hotpotqa.jsonl"
    file.parent.mkdir(parents=True)

    def answered(*answers: str, separators: tuple[str, str] = (",", ":")) -> StoredRun:
        row = {"context": "It is in Rome.", "input": "Where?", "answers": answers, "length": 5, "all_classes": None}
        file.write_text(json.dumps(row | {"_id": "a"}, separators=separators) + "\n")
        settings = {"data": Data(str(tmp_path / "data")), "generation": GenerationSettings(max_new_tokens=4)}
        return run(tmp_path / "runs", Full(), task=LongBench(datasets=["hotpotqa"]), **settings)

    first = answered("Pisa")
    assert answered("Pisa", separators=(" , ", " : ")).folder == first.folder
    corrected = answered("Rome", "Roma")
    assert corrected.folder != first.folder
    assert (first.summary["score"]["mean"], corrected.summary["score"]["mean"]) == (0.0, 1.0)


RANDOM = {"method": SnapKV(), "budget": 1.0, "budget_generated": 8, "keep_generated": "random"}


@pytest.mark.tokens
@pytest.mark.parametrize("how", [{}, {"shared_prefill": True}, RANDOM], ids=["alone", "shared", "random"])
def test_an_error_in_the_middle_loses_and_repeats_nothing(tmp_path: Path, how: dict[str, Any]) -> None:
    """Under Random Attention each example has draws of its own, whenever it runs."""
    how = {"task": niah(max_new_tokens=24), "baseline": "off", **how}
    whole = run(tmp_path / "whole", **how)
    with third_record_fails():
        run(tmp_path / "torn", **how)
    (lines,) = (tmp_path / "torn").glob("*/examples.jsonl")
    assert lines.read_text().count("\n") == 2
    with lines.open("a") as file:
        file.write('{"id": "half a li')
    assert without_times(run(tmp_path / "torn", **how)) == without_times(whole)


def two_jobs(root: Path, shared: bool) -> list[Job]:
    """Plan two jobs without Full, in the order in which their folders are opened."""
    settings = Settings(results=Results(root=str(root)), budget=0.5, baseline="off", shared_prefill=shared)
    jobs = [Job.plan(method, niah(), MODEL, settings) for method in (PQ, Streaming())]
    return sorted(jobs, key=lambda job: job.folder)


@both
def test_a_folder_that_cannot_be_opened_fails_its_own_job(tmp_path: Path, shared: bool) -> None:
    torn, other = jobs = two_jobs(tmp_path, shared)
    torn.folder.mkdir()
    (torn.folder / "run.json").write_text('{"status": ')
    errors = list[Exception]()
    finished = evaluate_together(jobs, errors.append)
    assert [(stored.folder, stored.status, len(stored.records)) for stored in finished] == [
        (other.folder, "complete", 4)
    ]
    assert [(type(error), str(torn.folder) in str(error)) for error in errors] == [(StoreError, True)]
    with pytest.raises(StoreError, match=r"run\.json"):
        evaluate_together(jobs)


def test_a_job_that_does_not_fit_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large, other = jobs = two_jobs(tmp_path, shared=False)

    def refuse(job: Job, beside: object) -> None:
        if job.folder == large.folder:
            raise SettingsError("This needs more memory than there is.")

    monkeypatch.setattr(Job, "refuse_memory", refuse)
    errors = list[Exception]()
    assert [stored.folder for stored in evaluate_together(jobs, errors.append)] == [other.folder]
    assert [type(error) for error in errors] == [SettingsError]


@both
def test_a_run_that_was_killed_after_its_last_example_ends_whatever_fails_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    killed, lacking = jobs = two_jobs(tmp_path, shared)
    before = evaluate_together(jobs)[0].records
    rewrite(killed.folder, status="running")
    (lacking.folder / "examples.jsonl").unlink()

    def fails(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("harness.jobs.job.load", fails)
    errors = list[Exception]()
    finished = evaluate_together(jobs, errors.append)
    assert [(stored.folder, stored.status, stored.records) for stored in finished] == [
        (killed.folder, "complete", before)
    ]
    assert [type(error) for error in errors] == [MemoryError]
    assert read_json(lacking.folder / "run.json")["status"] == "failed"


@pytest.mark.tokens
def test_what_was_timed_on_this_machine_is_written_down_and_kept(tmp_path: Path) -> None:
    """A run that goes on uses its first session's fit; the numbers as a parameter repeat the run."""
    auto = replace(PQ, iterations="auto")
    finished = run(tmp_path, auto, baseline="off")
    measured = read_json(finished.folder / "run.json")["measured"]
    assert len(measured["iterations"]) == 7
    other = {"iterations": [0.0, 0.0, 1.0, 0.0, 0.5, 0.0, 0.01]}
    rewrite(finished.folder, measured=other)
    (finished.folder / "examples.jsonl").unlink()
    again = run(tmp_path, auto, baseline="off")
    assert read_json(again.folder / "run.json")["measured"] == other
    repeated = run(tmp_path, replace(PQ, **other), baseline="off")
    assert [record.tokens for record in repeated.records] == [record.tokens for record in again.records]


def test_a_method_that_times_nothing_takes_no_parameter_from_the_folder(tmp_path: Path) -> None:
    """One of kvpress names code."""
    finished = run(tmp_path, STREAMING, budget=0.2, baseline="off")
    rewrite(finished.folder, measured={"no_such_parameter": "planted.Press"})
    (finished.folder / "examples.jsonl").unlink()
    assert len(run(tmp_path, STREAMING, budget=0.2, baseline="off").records) == len(finished.records)


@pytest.mark.parametrize(("gpus", "device", "dtype"), [(0, "cpu", "fp32"), (1, "cuda", "bf16")])
def test_a_run_is_known_by_the_device_and_dtype_that_auto_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, dtype: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    model = replace(MODEL, shape="llama-3.1-8b")  # published in bf16
    results = Results(root=str(tmp_path))
    chosen = Job.plan(PQ, niah(), model, Settings(results=results))
    named = Job.plan(PQ, niah(), model, Settings(results=results, device=device, dtype=dtype))
    assert (chosen.config["device"], chosen.config["dtype"]) == (device, dtype)
    assert chosen.identity == named.identity
    assert Job.plan(PQ, niah(), model, Settings(results=results, dtype="fp16")).config["dtype"] == "fp16"


def test_overlap_is_on_by_default_only_where_a_gpu_gains_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(overlap: str) -> str:
        return str(Job.plan(PQ, niah(), MODEL, Settings(placement="host", overlap=overlap)).config["overlap"])

    assert [resolved(overlap) for overlap in ("auto", "off", "on")] == ["auto", "auto", "on"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert [resolved(overlap) for overlap in ("auto", "off", "on")] == ["off", "off", "on"]


def test_chunks_that_change_answers_are_said_at_the_start_and_in_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for method, chunk, changed in ((InfLLM(), 64, 1), (LMInfinite(), 64, 1), (InfLLM(), None, 0), (STREAMING, 64, 0)):
        settings = Settings(results=Results(root=str(tmp_path)), prefill_chunk=chunk, baseline="off")
        said = Job.plan(method, niah(), MODEL, settings).facts()["cautions"]
        sentence = f"prefill_chunk={chunk} changes what {type(method).__name__} computes of longer prompts"
        assert sum(sentence in words for words in (*said, capsys.readouterr().err)) == 2 * changed


def test_a_limit_that_is_the_examples_own_is_no_other_run() -> None:
    own, same, other = (
        Job.plan(PQ, niah(), MODEL, Settings(generation=GenerationSettings(max_new_tokens=limit)))
        for limit in (None, 6, 5)
    )
    assert own.identity == same.identity != other.identity
    assert [item.new_tokens for item in same.items] == [6] * 4


@pytest.mark.parametrize("wrong", ["cuda", "cuda:7", "cdua"])
def test_a_device_that_is_not_here_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(DeviceError, match=f"device={wrong}"):
        run(tmp_path, device=wrong)
    assert list(tmp_path.iterdir()) == []


def test_methods_started_together_share_one_full(tmp_path: Path) -> None:
    methods = ("streaming", "oracle", "quest")
    arguments = [*MODEL_ARGS, *TASK_ARGS, f"results.root={tmp_path}"]
    started = [Forked(forks.module, "harness", *arguments, f"method={method}", "budget=0.5") for method in methods]
    assert [(process.wait(), process.err) for process in started if process.wait()] == []
    infos = {info["method"]: info for info in map(read_json, tmp_path.glob("*/run.json"))}
    assert infos.keys() == {"full", *methods}
    assert all(info["status"] == "complete" and "earlier" not in info for info in infos.values())


# One prefill for a whole sweep gives the scores and tokens of separate runs, and says that it paid no prefill; what
# becomes of folders, locks, errors and measurements is the same with and without it.

ORACLE = Oracle(sinks=4, recent_ratio=0.5)
JOBS = [(Full(), "device"), (ORACLE, "device"), (PQ, "host"), (PQ, "device"), (STREAMING, "device")]


def settings(root: Path, **changes: object) -> Settings:
    return Settings(results=Results(root=str(root)), **changes)  # type: ignore[arg-type]


@pytest.mark.tokens
@pytest.mark.parametrize("protocol", mostly_slow(["prompt", "context"], "prompt"))
def test_equal_to_separate_runs(tmp_path: Path, protocol: str) -> None:
    task = niah(depths=2, needle="passkey")
    together = evaluate_together(
        [
            Job.plan(
                method, task, MODEL, settings(tmp_path / "a", protocol=protocol, placement=place, shared_prefill=True)
            )
            for method, place in JOBS
        ]
    )
    for (method, place), shared in zip(JOBS, together, strict=True):
        alone = evaluate(method, task, MODEL, settings(tmp_path / "b", protocol=protocol, placement=place))
        assert [r.tokens for r in shared.records] == [r.tokens for r in alone.records]
        assert shared.summary["score"] == alone.summary["score"]
        assert shared.summary["budget"] == alone.summary["budget"]
        assert shared.summary["memory"]["kv_device_bytes"] == alone.summary["memory"]["kv_device_bytes"]
        assert shared.summary["memory"]["moved_bytes_per_step"] == alone.summary["memory"]["moved_bytes_per_step"]
        assert (shared.summary["full"] is None) == (method == Full())
        assert shared.summary["simulated"]
        assert shared.summary["ttft_s"]["p50"] is None
        assert shared.folder != alone.folder


@pytest.mark.tokens
def test_a_method_with_a_prefill_of_its_own_runs_beside(tmp_path: Path) -> None:
    """It is the run that it would be alone, with its times, held against the Full of the sweep."""
    task = niah(depths=2)
    shared = settings(tmp_path, shared_prefill=True, budget=0.6)
    infllm = InfLLM(n_init=4, block=16, repr_topk=2, exc_block=32)
    sweep = evaluate_together([Job.plan(method, task, MODEL, shared) for method in (infllm, PQ)])
    by_method = {finished.summary["method"]: finished for finished in sweep}
    assert by_method["full"].summary["simulated"]
    assert by_method["pqcache"].summary["simulated"]
    assert not by_method["infllm"].summary["simulated"]
    assert by_method["infllm"].summary["ttft_s"]["p50"] > 0
    assert by_method["infllm"].full_folder == by_method["full"].folder
    assert by_method["infllm"].summary["full"]["mean"] == by_method["full"].summary["score"]["mean"]
    alone = evaluate(infllm, task, MODEL, settings(tmp_path, budget=0.6, baseline="off"))
    assert (alone.folder, alone.records) == (by_method["infllm"].folder, by_method["infllm"].records)


class Writes(StreamingKeep):
    def observe(self, x: AttnInput) -> None:
        x.v.mul_(0.9)


class Careless(Streaming):
    policies = (Writes,)


def test_a_method_that_writes_into_a_shared_prompt_fails_alone(tmp_path: Path) -> None:
    shared, found = settings(tmp_path, shared_prefill=True, budget=0.5, baseline="off"), list[Any]()
    for methods in ((PQ, STREAMING), (Careless(), PQ, Careless(sinks=1), STREAMING)):
        for folder in tmp_path.iterdir():
            rmtree(folder)
        errors = list[Exception]()
        jobs = [Job.plan(method, niah(depths=2), MODEL, shared) for method in methods]
        found.append(sorted(map(without_times, evaluate_together(jobs, errors.append)), key=str))
    assert found[0] == found[1]
    assert len(errors) == 2
    assert all(re.match(r"In layer 0 of Careless, x\.v was .* in place, .*: change a copy", str(one)) for one in errors)


@both
def test_a_run_holds_its_lock_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    real, locked = Runner.record, []

    def watched(self: Runner, *arguments: Any) -> Any:
        locked.extend(map(is_locked, tmp_path.iterdir()))
        return real(self, *arguments)

    monkeypatch.setattr(Runner, "record", watched)
    finished = evaluate(PQ, niah(depths=2), MODEL, settings(tmp_path, shared_prefill=shared, baseline="off"))
    assert locked == [True, True]
    assert not is_locked(finished.folder)
