"""The benchmark of Full against model.generate: what it runs, how it compares, what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.bench import __main__ as bench
from harness.bench.generate import theirs
from harness.models.base import LoadedModel
from tests.tape import Tape


@pytest.mark.tokens
def test_a_side_that_fails_is_a_row_with_the_reason_and_steps_are_captured_as_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[Tape] = []

    class Counted(Tape):
        def capture(self, step: Any) -> Any:
            captured.append(self)
            return super().capture(step)

    def fails(loaded: LoadedModel, *_: Any) -> Any:
        if loaded.model.dtype == torch.bfloat16:
            raise torch.OutOfMemoryError("no room for bf16")
        return theirs(loaded, *_)

    monkeypatch.setattr("harness.bench.generate.usual_graphs", lambda device: Counted())
    monkeypatch.setattr("harness.bench.generate.theirs", fails)
    words = ["generate", "--shape", "tiny", "--tokens", "300", "--new", "5", "--rounds", "2", "--out", str(tmp_path)]
    assert bench.main(words) == 0
    fp32, failed = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert fp32["same_tokens"]
    assert fp32["tpot_s"]["ratio"][0] > 0
    assert "300 tokens, generate bf16" in (tmp_path / "table.md").read_text()
    assert failed == {"label": "300 tokens, generate bf16", "error": "OutOfMemoryError: no room for bf16"}
    assert captured
