"""`batch=N` runs any task: each example gets what it gets alone, and its record holds its own costs."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from evals.base import Example, TaskEnv
from evals.niah import Niah
from harness.config.settings import GenerationSettings, SettingsError
from harness.engine.engine import Engine
from harness.engine.facts import held
from harness.results.measures import MEASURES
from harness.results.records import Record
from harness.results.run_folder import StoredRun
from methods.base import Method
from methods.kvzip import KVzip
from methods.tiers.tier import TIERS
from tests import fast
from tests.fast import PQ
from tests.tape import Tape

OWN = (
    "output", "tokens", "stop", "score", "prompt_tokens", "context_tokens", "sealed", "fallback",
    *held(TIERS), *MEASURES,
)  # fmt: skip


@dataclass(frozen=True)
class Uneven(Niah):
    """Every other answer is shorter, or longer by force."""

    def examples(self, env: TaskEnv) -> Any:
        for i, example in enumerate(super().examples(env)):
            yield self.changed(example, i)

    def changed(self, example: Example, i: int) -> Example:
        return replace(example, max_new_tokens=4 + 5 * (i % 2), min_new_tokens=3 * (i % 3))


@dataclass(frozen=True)
class Given(Uneven):
    """Answers are fed, of unequal lengths."""

    def changed(self, example: Example, i: int) -> Example:
        return replace(example, references=("and so on " * (i + 1),), teacher_forced=True)

    def score(self, example: Example, output: str) -> Any:
        return super().score(example, "")


TASK = Uneven(lengths=[200, 270, 340], depths=2, max_new_tokens=6, template="{context}\n\n{question}")


def run(folder: Path, method: Method = PQ, task: Niah = TASK, **changes: Any) -> StoredRun:
    return fast.run(folder, method, task, **{"budget": 0.3} | changes)


def own(record: Record) -> dict[str, Any]:
    line = json.loads(record.to_json())
    return {name: line[name] for name in OWN}


def records(made: StoredRun) -> dict[str, Record]:
    """They are written as they end."""
    assert len({record.id for record in made.records}) == len(made.records) == made.summary["num_examples"]
    return {record.id: record for record in made.records}


@pytest.mark.tokens
@pytest.mark.parametrize(
    "changes",
    [
        {"placement": "host"},
        {"protocol": "context", "prefill_chunk": 90},
        {"method": replace(PQ, cache_tokens=60, cache_block=16), "placement": "host"},
        {"shared_prefill": True},
        {"shared_prefill": True, "method": KVzip(chunk=100)},
        {"task": Given(lengths=[200, 270], depths=2, template="{context}\n\n{question}")},
        {"generation": GenerationSettings(force_length=True)},
    ],
    ids=["host", "context", "hits", "shared", "kvzip", "forced", "force_length"],
)
def test_each_example_gets_what_it_gets_alone(tmp_path: Path, changes: dict[str, Any]) -> None:
    alone, together = records(run(tmp_path, **changes)), records(run(tmp_path, batch=3, **changes))
    assert together.keys() == alone.keys()
    for name, record in together.items():
        if changes.get("task") is not None:  # a likelihood, which rounds otherwise in a product of three rows
            assert float(record.output) == pytest.approx(float(alone[name].output), abs=1e-4)
            record = replace(record, output=alone[name].output)
        assert own(record) == own(alone[name])
    assert len({record["kv_device_bytes"] for record in together.values()}) > 1


def test_no_more_caches_are_held_than_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prompt is prefilled, those that have ended are gone."""
    caches, alive, plain = list[Any](), list[int](), Engine.cache

    def counted(engine: Engine, *given: Any) -> Any:
        gc.collect()
        alive.append(sum(cache() is not None for cache in caches))
        cache = plain(engine, *given)
        caches.append(ref(cache))
        return cache

    monkeypatch.setattr(Engine, "cache", counted)
    run(tmp_path, batch=3)
    assert len(alive) == 6
    assert max(alive) == 2


@pytest.mark.tokens
def test_a_run_whose_steps_are_captured_is_another_run_with_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for CUDA graphs: a CPU captures nothing."""
    plain = run(tmp_path)
    with pytest.raises(SettingsError, match=r"graphs=on .*device=cpu"):
        run(tmp_path, graphs="on")
    monkeypatch.setattr("harness.jobs.runner.CudaGraphs", lambda device: Tape())
    monkeypatch.setattr("harness.jobs.resolve.refuse_graphs", lambda *_: None)
    for batch in (1, 2):
        captured = run(tmp_path, batch=batch, graphs="on")
        assert captured.info["plain_steps"] is None
        assert captured.info["identity_sha256"] != plain.info["identity_sha256"]
        for name, record in records(captured).items():
            assert own(record) == own(records(plain)[name])
            assert record["capture_s"] is not None
