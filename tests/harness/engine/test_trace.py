"""Where the time of a decode step goes: parts that add up, and the same tokens."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from harness.config.settings import Results, Settings
from harness.engine.step_parts import PARTS
from harness.engine.trace import Stopwatch
from harness.jobs.evaluate import evaluate, evaluate_together
from harness.jobs.job import Job
from harness.reports.columns import measurements
from harness.reports.compare import comparisons
from harness.results.records import Record
from harness.results.run_folder import StoredRun, load
from tests.fast import MODEL, PQ, niah


def bytes_read(record: Record) -> float:
    read = record["read_bytes_per_step"]
    assert read
    return read


def settings(folder: Path, **changes: Any) -> Settings:
    return Settings(results=Results(root=str(folder)), budget=0.2, placement="host", **changes)


def run(folder: Path, **changes: Any) -> StoredRun:
    return evaluate(PQ, niah(), MODEL, settings(folder), **changes)


def test_a_traced_run_says_where_its_steps_spent_their_time(tmp_path: Path) -> None:
    made = run(tmp_path, trace="on")
    for record in made.records:
        trace = record["trace"]
        assert trace["parts_s"].keys() == set(PARTS)
        assert all(seconds >= 0 for seconds in trace["parts_s"].values())
        assert all(trace["parts_s"][part] > 0 for part in ("select", "fetch", "attend", "model"))
        assert 0 < trace["step_s"] < record.token_s[-1]
        assert record["read_bytes_per_step"]
    assert made.summary["memory"]["read_bytes_per_step"] == fmean(
        one["read_bytes_per_step"] or 0 for one in made.records
    )
    assert made.summary["traced"]
    assert made.summary["tpot_s"]["p50"] is made.summary["throughput_tok_s"] is None
    assert made.summary["trace"].keys() == {"step_s", *(f"{part}_s" for part in PARTS)}
    plain = run(tmp_path)
    assert plain.folder != made.folder
    assert [record.tokens for record in plain.records] == [record.tokens for record in made.records]
    assert {record["trace"] for record in plain.records} == {None}
    full = load(made.full_folder)
    [table] = comparisons([full, load(made.folder)])
    shares = []
    for whole, part in zip(full.records, made.records, strict=True):
        shares.append(bytes_read(part) / bytes_read(whole))
        size = bytes_read(whole) / (whole["attended_total"] or 0)  # of a token, in all layers
        index = bytes_read(part) - size * (part["attended_total"] or 0)
        assert 0 < index < 0.1 * bytes_read(whole)
    columns = {column.head: column.values for column in measurements(table)}
    assert columns["read"] == [fmean(map(bytes_read, one.records)) for one in (full, made)]
    assert columns["read\nof Full's"] == [None, fmean(shares)]
    shared = evaluate_together([Job.plan(PQ, niah(), MODEL, settings(tmp_path, trace="on", shared_prefill=True))])
    assert all(record["trace"] and record["trace"]["parts_s"]["attend"] > 0 for one in shared for record in one.records)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_spans_on_a_gpu_are_the_device_s_time() -> None:
    watch, x = Stopwatch(torch.device("cuda")), torch.randn(4096, 4096, device="cuda")
    torch.mm(x, x)  # the first product waits for the host, which prepares the library
    with watch.span("small"):
        torch.mm(x, x)
    with watch.span("large"):
        for _ in range(50):
            torch.mm(x, x)
    spent = watch.totals()
    assert spent["large"] > 5 * spent["small"] > 0
