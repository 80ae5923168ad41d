"""The benchmark of Full against model.generate: what it runs, how it compares, what it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from harness.bench import __main__ as bench
from harness.bench.generate import FOLLOWED, TimedRun, agreement, compare, theirs
from harness.engine.graph import CudaGraphs, usual_graphs
from harness.models.base import LoadedModel
from harness.models.random import Random
from tests.tape import Tape


def bf16_attention_fails() -> str:
    """Why transformers cannot generate in bf16 here: on a CPU with AMX whose vector instructions are taken away
    (ATEN_CPU_CAPABILITY), torch's own attention takes the way for AMX and finds half of it missing."""
    q = torch.zeros(1, 1, 64, 16, dtype=torch.bfloat16)
    try:
        scaled_dot_product_attention(q, q, q, is_causal=True)
    except RuntimeError as error:
        return f"torch's own attention in bf16 fails here: {error}"
    return ""


def test_best_of_each_may_be_different_dtypes() -> None:
    runs = {
        ("ours", "fp32"): [TimedRun([1, 2], 4.0, 2.0)] * 3,
        ("ours", "bf16"): [TimedRun([1, 2], 2.0, 1.0)] * 3,
        ("generate", "fp32"): [TimedRun([1, 2], 5.0, 4.0)] * 3,
        ("generate", "bf16"): [TimedRun([1, 3], 4.0, 8.0)] * 3,
    }
    fp32, bf16, best = compare(runs, 100, eos={9}, agree={"fp32": 1.0, "bf16": 0.9})
    assert fp32["same_tokens"]
    assert not bf16["same_tokens"]
    assert best["ttft_s"]["dtypes"] == ["bf16", "bf16"]
    assert best["tpot_s"]["dtypes"] == ["bf16", "fp32"]
    assert best["ttft_s"]["ratio"].median == 0.5
    assert best["tpot_s"]["ratio"].median == 0.25


def test_tokens_behind_the_first_eos_are_not_compared() -> None:
    runs = {("ours", "fp32"): [TimedRun([1, 9, 3], 1.0, 1.0)], ("generate", "fp32"): [TimedRun([1, 9, 4], 1.0, 1.0)]}
    (row,) = compare(runs, 100, eos={9}, agree={"fp32": 1.0})
    assert row["same_tokens"]


@pytest.mark.tokens
def test_agreement_is_the_share_of_tokens_that_both_would_pick() -> None:
    source = Random(shape="tiny", layers=2, seed=0, tokenizer_name="bytes")
    exact, other = source.load("fp32", "cpu"), replace(source, seed=1).load("fp32", "cpu")
    text = torch.randint(0, 200, (1, FOLLOWED + 40), generator=torch.Generator().manual_seed(0))
    assert agreement(exact, exact, text) == 1.0
    assert agreement(exact, other, text) < 0.5


@pytest.mark.tokens
def test_a_side_that_fails_is_a_row_with_the_reason_and_steps_are_captured_as_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Tape] = []

    class Counted(Tape):
        def capture(self, step: Any) -> Any:
            made.append(self)
            return super().capture(step)

    def fails(loaded: LoadedModel, *_: Any) -> Any:
        if loaded.model.dtype == torch.bfloat16:
            raise torch.OutOfMemoryError("no room for bf16")
        return theirs(loaded, *_)

    monkeypatch.setattr("harness.bench.generate.usual_graphs", lambda device: Counted())
    monkeypatch.setattr("harness.bench.generate.theirs", fails)
    words = ["generate", "--shape", "tiny", "--tokens", "300", "--new", "5", "--rounds", "2", "--out", str(tmp_path)]
    assert bench.main([*words, "--no-plot"]) == 0
    fp32, failed = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert fp32["same_tokens"]
    assert failed == {"label": "300 tokens, generate bf16", "error": "OutOfMemoryError: no room for bf16"}
    assert made


def test_a_gpu_captures_where_nobody_says() -> None:
    assert usual_graphs(torch.device("cpu")) is None
    assert isinstance(usual_graphs(torch.device("cuda")), CudaGraphs)


@pytest.mark.tokens
@pytest.mark.bf16
def test_command_writes_table_figures_and_picture(tmp_path: Path) -> None:
    if reason := bf16_attention_fails():
        pytest.skip(reason)
    words = ["generate", "--shape", "tiny", "--tokens", "300", "--new", "5", "--rounds", "2", "--out", str(tmp_path)]
    assert bench.main(words) == 0
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["dtype"] for row in rows] == ["fp32", "bf16", "best of each"]
    assert rows[0]["same_tokens"]
    assert rows[0]["agreement"] == 1.0
    assert 0 < rows[1]["agreement"] <= 1.0
    assert all(row["tpot_s"]["ratio"][0] > 0 for row in rows)
    assert (tmp_path / "table.md").read_text().count("best of each") == 1
    assert (tmp_path / "plot.png").stat().st_size > 5000
