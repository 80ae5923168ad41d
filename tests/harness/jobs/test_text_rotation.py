"""Runs of a model that rotates by the length of the text: what runs beside an example changes nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evals.base import Task
from harness.config.settings import Settings
from harness.jobs.examples import prepare
from harness.models.hub import HuggingFace
from harness.results.records import Record
from harness.results.run_folder import StoredRun
from methods.full import Full
from tests import fast
from tests.fast import MODEL
from tests.harness.jobs.test_questions import Balances
from tests.tiny import by_length, saved

each_model = pytest.mark.parametrize(
    ("architecture", "kind"), [("llama", "longrope"), ("phi3", "longrope"), ("llama", "dynamic")]
)


def model_of(folder: Path, architecture: str, kind: str, border: int) -> HuggingFace:
    """A tiny model with a token per byte, whose rotation changes beyond `border` tokens."""
    model = by_length(architecture, kind, border, vocab_size=len(MODEL.tokenizer()))
    return replace(saved(model, folder), window=4 * border)


def run(root: Path, model: HuggingFace, task: Task, **changes: Any) -> StoredRun:
    return fast.run(root, Full(), task, model, **changes)


def answers(records: Sequence[Record]) -> dict[str, list[list[int]]]:
    return {record.id: [list(turn.tokens) for turn in record.replies] for record in records}


def counts(records: Sequence[Record]) -> dict[str, int]:
    return {record.id: record["recomputed"] for record in records}


def prompts(task: Task) -> list[int]:
    return sorted(len(item.prompt.ids) for item in prepare(task, MODEL, Settings(protocol="context")))


@each_model
def test_batch_chunks_and_protocol_change_no_answer(tmp_path: Path, architecture: str, kind: str) -> None:
    """Prompts lie on both sides of the border, and some answers cross it."""
    model = model_of(tmp_path / "model", architecture, kind, prompts(Balances())[3])
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
    assert bool(counted) == (architecture == "phi3")
    assert alone.summary["recomputed"] == counted
    warnings = [
        warning for warning in alone.summary["warnings"] if "computed anew because their text outgrew" in warning
    ]
    assert warnings == (
        [
            f"{counted} of 8 examples were computed anew because their text outgrew a length from which the "
            "model rotates all of it otherwise"
        ]
        if counted
        else []
    )


@each_model
def test_conversations_are_the_same_wherever_histories_are(tmp_path: Path, architecture: str, kind: str) -> None:
    model = model_of(tmp_path / "model", architecture, kind, max(prompts(Balances())) + 40)
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
