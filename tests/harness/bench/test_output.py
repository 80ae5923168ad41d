"""What benchmarks write: rows as they come, marked where other load or launches got into a sample."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.bench import __main__ as bench
from harness.bench.common import limits, measure, output
from harness.bench.common.measure import LoadCounts, LoadWatch, MarkedSeconds, marks, own_seconds
from tests.abandoned import abandoned

ROOT = Path(__file__).parents[3]
CLEAN = {"samples": 3, "disturbed": 0, "with_launches": 0}


TABLE = output.table(output.Cell("what", "what", left=True))


def report(folder: Path | None, **options: Any) -> output.Report:
    return output.Report("ops", "A title", argparse.Namespace(out=folder, device="cpu", **options), TABLE, limits={})


def result(folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return made


def test_each_row_is_written_and_printed_when_it_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = report(tmp_path)
    made.add({"what": "first", **CLEAN}, "first: 1 ms")
    assert capsys.readouterr().out.endswith("first: 1 ms\n")
    assert [row["what"] for row in result(tmp_path)["rows"]] == ["first"]
    assert result(tmp_path)["status"] == "partial"
    assert (tmp_path / "table.md").read_text().startswith("PARTIAL: ")
    made.add({"what": "second", **CLEAN}, "second: 2 ms")
    assert [row["what"] for row in made.finish()] == ["first", "second"]
    assert result(tmp_path)["status"] == "complete"
    assert (tmp_path / "table.md").read_text().startswith("A title")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "table.md"]


ENDLESS = """
import sys
from harness.bench import __main__ as bench, ops
from tests.harness.bench.test_ops import LIMITS
measured = ops.measure
def slowing(case, *rest):
    if case.op == "top_k":
        print("waiting to be killed", flush=True)
        sys.stdin.read()
    return measured(case, *rest)
ops.measure = slowing
ops.limits.measured = lambda device: LIMITS
bench.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_benchmark_leaves_its_rows_and_says_that_it_is_partial(tmp_path: Path) -> None:
    words = "ops --heads 4 --kv-heads 2 --head-dim 64 --tokens 600 --budget 128 --prefill 40 --rounds 1 --dtype fp32"
    words += f" --ops group_weights top_k --out {tmp_path}"
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, *words.split()], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    while not lines or "waiting to be killed" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], "it has ended by itself"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    made = result(tmp_path)
    assert made["status"] == "partial"
    assert made["rows"]
    assert {row["op"] for row in made["rows"]} == {"group_weights"}
    assert made["provenance"]["machine"]["device"] == "cpu"
    assert "| group_weights |" in (tmp_path / "table.md").read_text()
    assert sum(line.startswith("group_weights") for line in lines) == len(made["rows"])


def test_the_next_benchmark_removes_the_store_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "ROOT", tmp_path)
    (tmp_path / "ops-of-yesterday").mkdir()
    left = abandoned(tmp_path / "ops-of-yesterday")
    assert left.exists()
    report(None)
    assert not left.exists()


def test_an_interrupted_benchmark_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.bench.common.limits.measured", interrupted)
    assert bench.main(["ops", "--out", str(tmp_path)]) == 130
    assert "interrupted; the rows so far are written" in capsys.readouterr().err


def test_disturbed_samples_are_marked_in_row_table_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = report(tmp_path)
    made.add({"what": "calm", **marks([MarkedSeconds(1.0), MarkedSeconds(2.0)])}, "calm")
    made.add({"what": "held up", **marks([MarkedSeconds(1.0, disturbed=True)], [MarkedSeconds(2.0)])}, "held up")
    made.finish()
    printed = capsys.readouterr().out
    assert "held up (1 of 2 samples disturbed)\n" in printed
    assert "1 of 2 rows hold samples in which other processes took the CPU" in printed
    assert [row["disturbed"] for row in result(tmp_path)["rows"]] == [0, 1]
    assert "| held up | 1 of 2 |" in (tmp_path / "table.md").read_text()


def test_what_does_not_fit_into_the_minutes_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = report(tmp_path, minutes=0.0)
    made.add({"what": "first", **CLEAN}, "first")
    assert made.out_of_time("second at 4096")
    made.finish()
    assert result(tmp_path)["left_out"] == ["second at 4096"]
    assert "Left out after 0 minutes: second at 4096." in capsys.readouterr().out
    assert not report(tmp_path, minutes=None).out_of_time("anything")


def test_errors_alone_are_an_error(tmp_path: Path) -> None:
    made = report(tmp_path)
    made.add(output.failed_row("first", "too small"), "first")
    with pytest.raises(ValueError, match="Nothing could be measured: too small"):
        made.finish()


@pytest.mark.parametrize(
    ("switches", "waited_s", "disturbed"), [(0, 0.0, False), (0, 0.5, False), (3, 0.001, False), (1, 0.05, True)]
)
def test_a_sample_is_disturbed_where_threads_lost_their_cpu_for_long(
    switches: int, waited_s: float, disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, found = iter([10.0, 11.0]), iter([LoadCounts(5, 2.0), LoadCounts(5 + switches, 2.0 + waited_s)])
    monkeypatch.setattr(measure, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(measure, "counts", lambda process: next(found))
    assert LoadWatch().disturbed() == disturbed


BUSY = "import os; os.sched_setaffinity(0, {%d})\nprint('on', flush=True)\nwhile True: pass"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone counts the waiting")
def test_a_neighbour_on_our_cpu_is_seen() -> None:
    """Both on one CPU for as long as the system takes to switch between them."""
    allowed = os.sched_getaffinity(0)
    cpu = min(allowed)
    process = subprocess.Popen([sys.executable, "-c", BUSY % cpu], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        os.sched_setaffinity(0, {cpu})
        watch = LoadWatch()
        while not watch.disturbed():  # else the suite's own limit ends this
            sum(range(100_000))
    finally:
        os.sched_setaffinity(0, allowed)
        process.kill()
        process.communicate()


class FakeDevice:
    """A stream of work that runs behind the host: each piece begins when the one before has ended, and is launched."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.host = self.done = 0.0
        patch.setattr(torch.cuda, "synchronize", lambda *_: self.wait())
        patch.setattr(torch.cuda, "_sleep", lambda cycles: self.run(cycles / 2e9, launch=0.0))
        patch.setattr(torch.cuda, "Event", lambda **_: FakeEvent(self))
        patch.setattr(torch.cuda, "device", lambda _: nullcontext())

    def run(self, seconds: float, launch: float) -> None:
        self.host += launch
        self.done = max(self.host, self.done) + seconds

    def wait(self) -> None:
        self.host = max(self.host, self.done)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def record(self) -> None:
        self.at = max(self.device.host, self.device.done)

    def query(self) -> bool:
        return self.device.host >= self.at

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1e3 * (other.at - self.at)


def slow_launches(device: FakeDevice) -> None:
    """Three kernels of 10 µs, which the host launches in 200."""
    for _ in range(3):
        device.run(10e-6, launch=200e-6)


def waiting(device: FakeDevice) -> None:
    slow_launches(device)
    device.wait()
    slow_launches(device)


@pytest.mark.parametrize(
    ("call", "seconds", "launches"), [(slow_launches, 30e-6, False), (waiting, 30e-6 + 610e-6, True)]
)
def test_launches_are_no_part_of_a_time_on_a_gpu(
    call: Callable[[FakeDevice], None], seconds: float, launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(monkeypatch)
    spent = own_seconds(lambda: call(device), torch.device("cuda"))
    assert spent.launches == launches
    assert float(spent) == pytest.approx(seconds)


def test_limits_are_the_best_of_all_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(limits, "SIDE", {"cpu": 32})
    found = limits.measured(torch.device("cpu"), 0.01)
    assert found["read_gb_s"] > 0
    assert found["read_by"] in ("torch.sum", "compiled loop")
    assert found["matmul_gflop_s"].keys() == {"fp32", "bf16"}
    assert min(found["matmul_gflop_s"].values()) > 0


def test_marks_of_plain_numbers_are_none() -> None:
    assert marks([1.0, 2.0], []) == {"samples": 2, "disturbed": 0, "with_launches": 0}
    assert measure.estimate([MarkedSeconds(1.0), MarkedSeconds(3.0)]).median == 2.0
