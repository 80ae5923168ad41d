"""The largest batch that is found is the one that was predicted, whichever memory ends it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.bench import throughput
from harness.bench.__main__ import main
from harness.bench.common import output
from harness.bench.common.growing import GrowingBatch
from harness.models.random import Random
from tests.quick import mostly_slow

MODEL = Random("tiny", 3, 0, "bytes")
TEXT = list(range(3, 250)) * 20
METHODS = ["full", "snapkv", "pqcache", "quest", "shadowkv:rank=16", "infinigen"]


def options(folder: Path, *words: str) -> Namespace:
    small = ["--dtype", "fp32", "--new", "50", "--out", str(folder), "--no-plot", "--methods"]
    made: Namespace = throughput.parser().parse_args([*words, *small])
    return made


def measured(asked: Namespace, method: str, model: Random = MODEL) -> list[dict[str, Any]]:
    asked.methods = [method]
    report = output.Report("throughput", "batches", asked, throughput.TABLE)
    throughput.run(asked, model.load("fp32", "cpu"), model.describe(), TEXT, report)
    assert not report.left_out, "memory is given back between methods"
    return [dict(row) for row in report.rows]


@pytest.mark.parametrize("words", mostly_slow(["300", "600", "900", "600 --synthetic"], "600"))
@pytest.mark.parametrize("method", METHODS)
def test_the_batch_that_is_found_is_the_one_that_was_predicted(method: str, words: str, tmp_path: Path) -> None:
    tokens = int(words.split()[0])
    weights = sum(x.nbytes for x in MODEL.load("fp32", "cpu").model.parameters())
    device, host = weights + 6_000 * tokens, 2_500 * tokens
    sizes = "--device-memory", str(device), "--host-memory", str(host)
    rows = measured(options(tmp_path, *sizes, "--tokens", *words.split()), method)
    *_, last, failed = rows
    assert "error" not in last
    assert (failed["batch"], failed["failed"]) == (last["batch"] + 1, last["ended"])
    assert failed["device_bytes"] > device or failed["host_bytes"] > host
    assert [row["batch"] for row in rows[:2]] == [1, 2]
    assert all(row["rate"] > 0 for row in rows[:-1])
    assert last["ended"] == "device" or (last["ended"] == "host" and last["placement"] == "host")
    assert abs(last["batch"] - last["predicted"]) <= 1
    assert last["device_bytes"] <= device
    assert last["host_bytes"] <= host


def test_it_ends_as_asked_and_says_what_does_not_fit(tmp_path: Path) -> None:
    rows = measured(options(tmp_path, "--tokens", "300", "--device-memory", "1GB", "--most", "3"), "snapkv")
    assert [(row["batch"], row.get("ended")) for row in rows] == [(1, None), (2, None), (3, "as asked")]
    (row,) = measured(options(tmp_path, "--tokens", "300", "--device-memory", "1MB"), "snapkv")
    assert row["error"].startswith("not even one sequence fits: beside ")
    assert row["error"].endswith("Give more --device-memory.")
    (row,) = measured(options(tmp_path, "--tokens", "300", "--device-memory", "1GB", "--budget", "3"), "pqcache")
    assert "budget" in row["error"]


def test_a_batch_whose_step_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = GrowingBatch.timed

    def failing(growing: GrowingBatch) -> dict[str, Any]:
        if len(growing.batch.slots) > 1:
            raise torch.OutOfMemoryError
        return timed(growing)

    monkeypatch.setattr(GrowingBatch, "timed", failing)
    rows = measured(options(tmp_path, "--tokens", "300", "--device-memory", "1GB"), "snapkv")
    assert [(row["batch"], row.get("ended"), row.get("failed")) for row in rows] == [
        (1, "device", None),
        (2, None, "device"),
    ]
    assert "rate" not in rows[1]


def test_synthetic_prompts_leave_layer_by_layer(tmp_path: Path) -> None:
    asked = options(tmp_path, "--tokens", "3000", "--device-memory", "1GB", "--most", "2", "--synthetic")
    rows = measured(asked, "pqcache")
    assert [row["batch"] for row in rows] == [1, 2]
    assert "ttft_s" not in rows[0]
    layer = rows[0]["host_bytes"] // MODEL.describe().num_layers
    weights = sum(x.nbytes for x in MODEL.load("fp32", "cpu").model.parameters())
    assert rows[0]["device_bytes"] - weights < 4 * layer


def test_the_command_draws_and_no_batch_attends_one_by_one_for_its_checks(tmp_path: Path) -> None:
    sizes = ["--shape", "tiny", "--layers", "2", "--dtype", "fp32", "--tokens", "300", "--device-memory", "1GB"]
    assert main(["throughput", *sizes, "--most", "2", "--methods", "snapkv", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [(row["batch"], row["one_by_one"]) for row in rows] == [(1, None), (2, None)]
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_cpu_must_say_what_it_stands_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["throughput", "--methods", "full"]) != 0
    assert "--device-memory says how large a device this CPU stands for" in capsys.readouterr().err
