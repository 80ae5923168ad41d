"""What is sent to Weights & Biases, with the real client kept offline."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.tracking import numbers, publish


def test_a_summary_becomes_flat_numbers() -> None:
    summary = {"score": {"mean": 0.5, "ci95": [0.1, 0.9]}, "full": None, "method": "pqcache", "simulated": False}
    assert dict(numbers(summary)) == {"score.mean": 0.5, "method": "pqcache", "simulated": False}


def test_one_wandb_run_per_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: dict[str, Any] = {}
    run = SimpleNamespace(summary={}, finish=lambda: calls.update(finished=True))
    fake = SimpleNamespace(init=lambda **arguments: (calls.update(arguments), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = tmp_path / "niah-pqcache-1234"
    publish("kv", folder, {"budget": 0.2}, {"score": {"mean": 1.0}})
    assert (calls["project"], calls["id"], calls["resume"]) == ("kv", "niah-pqcache-1234", "allow")
    assert calls["config"] == {"budget": 0.2}
    assert run.summary == {"score.mean": 1.0}
    assert calls["finished"]
