"""Runs of a model that rotates by the length of the text: what runs beside an example changes nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from evals.base import Task
from harness.config.settings import Results, Settings
from harness.jobs.evaluate import evaluate
from harness.jobs.examples import prepare
from harness.models.random import Random
from harness.results.records import Record
from harness.results.run_folder import StoredRun
from methods.base import Method
from methods.full import Full
from tests.harness.jobs.test_questions import Balances

LONGROPE, DYNAMIC = "longrope", "dynamic"


@dataclass(frozen=True)
class ByLength(Random):
    """A tiny random Llama, or Phi-3, whose rotation changes beyond `border` tokens."""

    shape: str = "tiny"
    layers: int | None = 2
    tokenizer_name: str = "bytes"
    kind: str = LONGROPE
    border: int = 400
    phi: bool = False

    def _arguments(self) -> dict[str, Any]:
        plain, long = super()._arguments(), self.kind == LONGROPE
        rope: dict[str, Any] = {"rope_type": self.kind, "rope_theta": 1e4, "factor": 4.0}
        own: dict[str, Any] = {
            "rope_parameters": rope,
            "max_position_embeddings": 4 * self.border if long else self.border,
        }
        if long:
            half = plain["hidden_size"] // plain["num_attention_heads"] // 2
            own["original_max_position_embeddings"] = rope["original_max_position_embeddings"] = self.border
            rope |= {"short_factor": [1.0] * half, "long_factor": [4.0] * half}
        return plain | own | ({"architectures": ["Phi3ForCausalLM"]} if self.phi else {})

    def config(self) -> Any:
        from transformers import AutoConfig

        plain = super().config()
        return (
            AutoConfig.for_model("phi3", **self._arguments(), eos_token_id=None, pad_token_id=0) if self.phi else plain
        )

    def context_window(self) -> int:
        return 4 * self.border


def run(root: Path, model: Random, task: Task, method: Method | None = None, **changes: Any) -> StoredRun:
    settings = Settings(results=Results(root=str(root)), baseline="off", warmup=0)
    return evaluate(method or Full(), task, model, settings, **changes)


def answers(records: Sequence[Record]) -> dict[str, list[list[int]]]:
    return {record.id: [list(turn.tokens) for turn in record.replies] for record in records}


def counts(records: Sequence[Record]) -> dict[str, int]:
    return {record.id: record["recomputed"] for record in records}


def prompts(task: Task) -> list[int]:
    return sorted(len(item.prompt.ids) for item in prepare(task, ByLength(), Settings(protocol="context")))


@pytest.mark.parametrize(("kind", "phi"), [(LONGROPE, False), (LONGROPE, True), (DYNAMIC, False)])
def test_batch_chunks_and_protocol_change_no_answer(tmp_path: Path, kind: str, phi: bool) -> None:
    """Prompts lie on both sides of the border, and some answers cross it."""
    model = ByLength(kind=kind, phi=phi, border=prompts(Balances())[3])
    alone = run(tmp_path / "alone", model, Balances())
    ways: list[dict[str, Any]] = [
        {"batch": 4}, {"prefill_chunk": 100}, {"protocol": "context"}, {"protocol": "context", "questions": "shared"},
        {"shared_prefill": True, "batch": 3},
    ]  # fmt: skip
    for number, way in enumerate(ways):
        finished = run(tmp_path / str(number), model, Balances(), **way)
        assert answers(finished.records) == answers(alone.records), way
        assert counts(finished.records) == counts(alone.records), way
    counted = sum(record["recomputed"] for record in alone.records)
    assert bool(counted) == phi
    assert alone.summary["recomputed"] == counted
    warnings = [
        warning for warning in alone.summary["warnings"] if "computed anew because their text outgrew" in warning
    ]
    assert warnings == (
        [
            f"{counted} of 8 examples were computed anew because their text outgrew a length from which the "
            "model rotates all of it otherwise"
        ]
        if phi
        else []
    )


@pytest.mark.parametrize(("kind", "phi"), [(LONGROPE, False), (LONGROPE, True), (DYNAMIC, False)])
def test_conversations_are_the_same_wherever_histories_are(tmp_path: Path, kind: str, phi: bool) -> None:
    model = ByLength(kind=kind, phi=phi, border=max(prompts(Balances())) + 40)
    by_history = {
        history: run(tmp_path / history, model, Balances(talks=True), history=history)
        for history in ("recompute", "device_prefix", "store")
    }
    wanted = answers(by_history["recompute"].records)
    for history in ("device_prefix", "store"):
        records = by_history[history].records
        assert answers(records) == wanted, history
        assert all(record["recomputed"] for record in records)
        assert all(any(turn["reused_tokens"] for turn in record.replies) for record in records)
