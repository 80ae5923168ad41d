"""The benchmark of the operations: what it runs is right, what it leaves out it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from harness.bench import __main__ as bench
from harness.bench import ops as bench_ops
from harness.bench.common.operations import parameters
from harness.bench.common.synthetic import LayerShape
from harness.bench.op_cases import Inputs, OpCase, cases
from harness.bench.rivals import rival
from kernels import ops
from tests.harness.bench.conftest import LIMITS

SHAPE = LayerShape(heads=4, kv_heads=2, head_dim=64, dtype=torch.float32, device=torch.device("cpu"))
INPUTS = Inputs(SHAPE, tokens=600, budget=128, prefill=40)
SMALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--tokens", "600", "--budget", "128", "--prefill", "40"]


def case(op: str, place: int = 0) -> OpCase:
    return [case for case in cases(INPUTS) if case.op == op][place]


def test_every_operation_has_cases() -> None:
    assert {case.op for case in cases(INPUTS)} == {op.name for op in ops.ALL}


def test_one_command_writes_table_figures_and_picture(tmp_path: Path) -> None:
    chosen = ["--ops", "top_k", "kmeans", "segment_attention"]
    assert bench.main(["ops", *SMALL, *chosen, "--rounds", "2", "--dtype", "fp32", "--out", str(tmp_path)]) == 0
    made = json.loads((tmp_path / "result.json").read_text())
    assert made["synthetic"]
    assert {row["op"] for row in made["rows"]} == set(chosen[1:])
    for row in made["rows"]:
        assert row["time_s"][0] > 0
        assert row["of_limit"][1] == pytest.approx(row["limit_s"] / row["time_s"][2])
        assert (row["reference"] is None) == (row["backend"] == "torch")
        assert row["backend"] not in row["refused"]
    full = next(row for row in made["rows"] if row["what"].startswith("Full"))
    assert full["rival"] == "transformers sdpa"
    (_, rival_low, rival_high), (_, low, high) = full["rival_s"], full["time_s"]
    assert rival_low / high <= full["beside_rival"][0] <= rival_high / low
    assert "| segment_attention | Full, 600 |" in (tmp_path / "table.md").read_text()


def test_the_limit_is_the_longer_of_reading_and_computing() -> None:
    full, prefill = case("segment_attention"), case("prefill_attention")
    assert bench_ops.limit_s(full, SHAPE, LIMITS) == pytest.approx(2 * 2 * 600 * 64 * 4 / 10e9)
    assert bench_ops.limit_s(prefill, SHAPE, LIMITS) == pytest.approx(4 * 4 * 64 * 40 * 41 / 2 / 100e9)


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("tried to allocate 128 GiB")


def test_a_backend_that_fails_is_a_row_with_the_reason_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain torch's, a rival's, and the inputs of a whole group of operations."""
    parameters("column_sums")  # kept for good, so not those of what replaces it here
    monkeypatch.setattr("kernels.windowed.column_sums", out_of_memory)
    monkeypatch.setattr(ops.column_sums, "_loaded", {})
    monkeypatch.setattr("harness.bench.rivals.gathered", out_of_memory)
    monkeypatch.setattr(Inputs, "coded", out_of_memory)  # attention's last cases, and those of rows but for the first
    words = ["ops", *SMALL, "--rounds", "2", "--dtype", "fp32", "--out", str(tmp_path)]
    assert bench.main([*words, "--ops", "segment_attention", "column_sums", "gather_rows", "rotate"]) == 0
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    failed = {row["label"] for row in rows if "error" in row}
    assert {"column_sums SnapKV, 32 of 600: torch", "gather_rows 128 of 600: rival"} <= failed
    assert {"further cases of attention at 600", "further cases of rows at 600"} <= failed
    assert any("time_s" in row for row in rows)
    assert "Not measured: column_sums" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize(
    ("op", "place"),
    [("segment_attention", 0), ("segment_attention", 1), ("segment_attention", 2), ("column_sums", 0),
     ("prefill_attention_with_column_sums", 0), ("gather_rows", 0)],
)  # fmt: skip
def test_rivals_compute_the_same(op: str, place: int) -> None:
    one = case(op, place)
    beside = rival(one)
    assert beside is not None
    wanted, got = bench_ops.OPS[op](*one.args), beside.call()
    got = got.transpose(1, 2) if op == "segment_attention" else got
    assert_close(got, wanted[1] if isinstance(wanted, tuple) else wanted, atol=1e-5, rtol=1e-4)


WRONG = [
    (["ops", "--tokens", "0"], "--tokens"), (["layer", "--tokens"], "--tokens"), (["decode", "--new", "2"], "--new 2"),
    (["decode", "--shape", "gpt5"], "--shape"), (["decode", "--shape", "tiny", "--layers", "9"], "layers=9"),
    (["layer", "--budget", "abc"], "--budget"), (["layer", "--minutes", "nan"], "--minutes"),
    (["ops", "--heads", "7", "--kv-heads", "3"], "--kv-heads 3"), (["layer", "--head-dim", "3"], "--head-dim 3"),
    (["ops", "--budget", "64"], "--budget 64"), (["ops", "--tokens", "99", "--budget", "100"], "--tokens 99"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_sizes_that_nothing_can_be_measured_at_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr("harness.bench.common.limits.measured", refuse)
    try:
        code = bench.main(words)
    except SystemExit as end:  # argparse's
        code = end.code
    assert code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
