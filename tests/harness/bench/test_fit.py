"""The benchmark that fits methods' steps writes a machine that plans read, and by how much each length was missed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.bench import __main__ as bench
from harness.bench import fit
from harness.bench.common import methods, models
from harness.machines.machine import machine
from harness.prompts.calibration import calibration_text
from methods.base import Method
from methods.full import Full

HERE = "here: {device: cpu, device_bytes: 1000000000, read_gb_s: 50, basis: measured, source: calibrate}\n"
TINY = ("--shape", "tiny", "--layers", "2", "--dtype", "fp32", "--no-plot")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    file = tmp_path / "machine.yaml"
    file.write_text(HERE)
    return file


def run(here: Path, *words: str) -> int:
    return bench.main(["fit", "--machine", str(here), *TINY, "--out", str(here.parent / "fit"), *words])


def test_it_writes_what_it_has_fitted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full's steps take a millisecond for each thousand tokens on top of ten, and the others' as long at any length."""

    def times(method: Method, tokens: int, *_: Any) -> list[float]:
        fastest = 10e-3 + tokens * 1e-6 if isinstance(method, Full) else 14e-3
        return [2 * fastest, fastest]

    monkeypatch.setattr(fit, "_times", times)
    assert run(here, "--methods", "snapkv", "pqcache", "--tokens", "1024", "4096", "9000", "--budget", "64") == 0
    there = machine(str(here.parent / "fit"))
    row_bytes = 2 * 2 * 2 * 16 * 4  # keys and values of 2 layers, 2 KV heads of 16 channels, fp32
    assert there.read_gb_s == pytest.approx(row_bytes / 1e-6 / 1e9, rel=1e-3)
    assert (there.basis, there.source) == ("measured", "python -m harness.bench fit")
    assert there.methods["full"].layer_s == pytest.approx(10e-3 / 2, rel=0.5)
    assert there.methods["snapkv"].layer_s == pytest.approx(14e-3 / 2, rel=0.5)
    rows = json.loads((here.parent / "fit" / "result.json").read_text())["rows"]
    assert [(row["method"], row["tokens"]) for row in rows] == [
        (name, tokens) for tokens in (1024, 4096, 9000) for name in ("full", "snapkv", "pqcache")
    ]
    full, snapkv = ([row["error_share"] for row in rows if row["method"] == name] for name in ("full", "snapkv"))
    assert max(map(abs, full)) < 1e-3
    assert max(map(abs, snapkv)) < 0.01


def test_a_turn_is_timed() -> None:
    """On the tiny model, in fp32."""
    options = argparse.Namespace(
        new=4, rounds=2, budget=64, placement="device", reuse_steps=0, synthetic=True, graphs=False, link=None
    )
    source = models.source("tiny", 2)
    loaded = source.load("fp32", "cpu")
    text = calibration_text(source.tokenizer(), 256)
    times = fit._times(methods.load("pqcache"), 300, options, loaded, text)
    assert len(times) == 2
    assert all(time > 0 for time in times)
    assert isinstance(loaded.model, torch.nn.Module)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "64", "128"], "--tokens needs three lengths"),
        (["--tokens", "64", "64", "128"], "--tokens needs three lengths"),
        (["--methods", "pqcash"], "--methods pqcash is unknown; did you mean pqcache?"),
    ],
)
def test_wrong_words_are_refused(
    here: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(here, *words) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_machine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["fit", "--machine", "nowhere", "--out", str(tmp_path)]) == 2
    assert "The machine nowhere is unknown" in capsys.readouterr().err
