"""One prefill for a whole sweep gives the scores and tokens of separate runs, and says that it paid no prefill."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from harness.config.settings import Results, Settings, SettingsError
from harness.jobs.run import evaluate
from harness.jobs.together import Wanted, evaluate_together
from harness.results.files import read_json
from harness.results.store import load
from methods.base import CacheState, KVLayer, LayerSpec
from methods.full import Full
from methods.infllm import InfLLM
from methods.oracle import Oracle
from methods.streaming import Streaming
from tests.fast import MODEL, PQ, STREAMING, niah

ORACLE = Oracle(sinks=4, recent_ratio=0.5)
JOBS = [(Full(), "device"), (ORACLE, "device"), (PQ, "host"), (PQ, "device"), (STREAMING, "device")]


def settings(root: Path, **changes: object) -> Settings:
    return Settings(results=Results(root=str(root)), progress=False, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", ["prompt", "context"])
def test_equal_to_separate_runs(tmp_path: Path, protocol: str) -> None:
    task = niah(depths=2, needle="passkey")
    together = evaluate_together(
        [
            Wanted(
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


def test_a_torn_sweep_goes_on_where_each_job_stopped(tmp_path: Path) -> None:
    task = niah(depths=4)
    wanted = [Wanted(m, task, MODEL, settings(tmp_path, shared_prefill=True)) for m in (Full(), ORACLE)]
    whole = evaluate_together(wanted)
    lines = whole[1].folder / "examples.jsonl"
    kept = lines.read_text().splitlines(keepends=True)[:1]
    lines.write_text("".join(kept))
    again = evaluate_together(wanted)
    assert again[0].records == whole[0].records
    assert again[1].records[0] == whole[1].records[0]
    assert [r.tokens for r in again[1].records] == [r.tokens for r in whole[1].records]


def test_what_cannot_share_is_refused_by_name(tmp_path: Path) -> None:
    infllm = InfLLM.__new__(InfLLM)
    with pytest.raises(SettingsError, match="InfLLM does not prefill densely"):
        evaluate_together([Wanted(infllm, niah(), MODEL, settings(tmp_path, shared_prefill=True))])
    with pytest.raises(SettingsError, match="use batch=1"):
        evaluate_together([Wanted(Full(), niah(), MODEL, settings(tmp_path, shared_prefill=True, batch=2))])


def test_each_job_names_the_operations_that_ran_for_it(tmp_path: Path) -> None:
    wanted = [Wanted(m, niah(depths=1), MODEL, settings(tmp_path, shared_prefill=True)) for m in (PQ, Full())]
    pq, full = (read_json(made.folder / "run.json")["backends"] for made in evaluate_together(wanted)[::-1])
    assert "prefill_attention" in pq
    assert "prefill_attention" in full
    assert "kmeans" in pq
    assert "kmeans" not in full


class Broken(Streaming):
    """Fails in the phase that `fails` names."""

    fails: ClassVar[str] = ""

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        layers = super().start(specs, cache)
        if self.fails == "start":
            raise KeyError("start")
        if self.fails in ("absorb", "attend"):
            setattr(layers[-1], self.fails, self._fail)
        return layers

    def _fail(self, *_: object) -> None:
        raise KeyError(self.fails)


@pytest.mark.parametrize("phase", ["start", "absorb", "attend"])
def test_a_job_that_fails_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    monkeypatch.setattr(Broken, "fails", phase)
    broken = Broken(sinks=4, positions="cache")
    task, failed = niah(depths=2), []
    wanted = [Wanted(m, task, MODEL, settings(tmp_path, shared_prefill=True)) for m in (broken, Full(), PQ)]
    made = evaluate_together(wanted, failed.append)
    assert [(one.summary["method"], one.summary["status"], len(one.records)) for one in made] == [
        ("full", "complete", 2),
        ("pqcache", "complete", 2),
    ]
    assert [type(error) for error in failed] == [KeyError]
    (text,) = tmp_path.glob("*/error.txt")
    assert f"KeyError: '{phase}'" in text.read_text()
    stored = load(text.parent)
    assert (stored.status, stored.info["error"]) == ("failed", f"KeyError: '{phase}'")
    monkeypatch.setattr(Broken, "fails", "")
    again = evaluate_together(wanted)
    assert [one.summary["status"] for one in again] == ["complete"] * 3
    assert not text.exists()
