"""One prefill for a whole sweep gives the scores and tokens of separate runs, and says that it paid no prefill; what
becomes of folders, locks, errors and measurements is the same with and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.config.settings import Results, Settings
from harness.jobs.evaluate import evaluate, evaluate_together
from harness.jobs.job import Job
from harness.jobs.runner import Runner
from harness.results.lock import is_locked
from methods.full import Full
from methods.infllm import InfLLM
from methods.oracle import Oracle
from tests.fast import MODEL, PQ, STREAMING, niah
from tests.quick import mostly_slow

ORACLE = Oracle(sinks=4, recent_ratio=0.5)
JOBS = [(Full(), "device"), (ORACLE, "device"), (PQ, "host"), (PQ, "device"), (STREAMING, "device")]

both = pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])


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
