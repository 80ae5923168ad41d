"""Where the time of a decode step goes: parts that add up, the same tokens, a profile beside the records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from harness.commands import report, show
from harness.config.settings import Results, Settings
from harness.engine.attach import attached
from harness.engine.engine import Engine
from harness.engine.step_parts import PARTS
from harness.engine.trace import PROFILE, Stopwatch, Tracer, clocked
from harness.jobs.evaluate import evaluate, evaluate_together
from harness.jobs.job import Job
from harness.reports.columns import measurements
from harness.reports.compare import comparisons
from harness.results.records import Record
from harness.results.run_folder import StoredRun, load
from kernels import ops
from tests.fast import MODEL, PQ, niah
from tests.tiny import prompt, tiny


def bytes_read(record: Record) -> float:
    read = record.measured["read_bytes_per_step"]
    assert read
    return read


def run(folder: Path, **changes: Any) -> StoredRun:
    settings = Settings(results=Results(root=str(folder)), budget=0.2, placement="host")
    return evaluate(PQ, niah(), MODEL, settings, **changes)


def names_in(file: Path) -> set[str]:
    return {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}


def test_a_traced_run_says_where_its_steps_spent_their_time(tmp_path: Path) -> None:
    made = run(tmp_path, trace="on")
    for record in made.records:
        trace = record.trace
        assert trace["parts_s"].keys() == set(PARTS)
        assert all(seconds >= 0 for seconds in trace["parts_s"].values())
        assert all(trace["parts_s"][part] > 0 for part in ("select", "fetch", "attend", "model"))
        assert 0 < trace["step_s"] < record.token_s[-1]
        assert record.measured["read_bytes_per_step"]
    assert made.summary["memory"]["read_bytes_per_step"] == fmean(
        one.measured["read_bytes_per_step"] or 0 for one in made.records
    )
    assert made.summary["traced"]
    assert made.summary["tpot_s"]["p50"] is made.summary["throughput_tok_s"] is None
    assert made.summary["trace"].keys() == {"step_s", *(f"{part}_s" for part in PARTS)}
    assert names_in(made.folder / PROFILE) >= {
        "decode step", "top_k", "gather_tiers"
    }  # fmt: skip
    assert "segment_attention" in names_in(made.full_folder / PROFILE)


@pytest.mark.tokens
def test_tracing_changes_no_token_and_is_another_run(tmp_path: Path) -> None:
    plain, traced = run(tmp_path, fidelity=1), run(tmp_path, fidelity=1, trace="on")
    assert plain.folder != traced.folder
    assert [record.tokens for record in plain.records] == [record.tokens for record in traced.records]
    assert [record.fidelity for record in plain.records] == [record.fidelity for record in traced.records]
    assert {record.trace for record in plain.records} == {None}
    assert {record.measured["read_bytes_per_step"] for record in plain.records} == {None}
    assert plain.summary["trace"] is None
    assert not (plain.folder / PROFILE).exists()


def test_an_operation_within_another_is_a_part_of_it() -> None:
    watch, seen = Stopwatch(torch.device("cpu")), list[str]()
    with clocked(watch, lambda name, arguments, made: seen.append(name)):
        ops.pick_channels(torch.ones(1, 2, 3, 16), 4, 1.0, False, False)  # which calls top_k
        ops.top_k(torch.ones(2, 9), 4)
    assert seen == ["pick_channels", "top_k"]


def test_reports_show_the_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(tmp_path, trace="on", baseline="off")
    assert report.main([str(tmp_path), "--details"]) == 0
    text = capsys.readouterr().out
    assert "read: bytes" in text
    assert "of Full's" not in text
    heads = [line.split() for line in text.splitlines() if line.startswith("method")]
    assert ["method", "budget", "step", *PARTS] in heads
    assert "T: traced" in text
    assert "TPOT" not in text
    assert show.main([str(made.folder)]) == 0
    assert "decode step, median" in capsys.readouterr().out


def test_reports_show_what_a_step_reads_and_its_share_of_full(tmp_path: Path) -> None:
    made = run(tmp_path, trace="on")
    full = load(made.full_folder)
    [table] = comparisons([full, load(made.folder)])
    shares = []
    for whole, part in zip(full.records, made.records, strict=True):
        shares.append(bytes_read(part) / bytes_read(whole))
        size = bytes_read(whole) / (whole.measured["attended_total"] or 0)  # of a token, in all layers
        index = bytes_read(part) - size * (part.measured["attended_total"] or 0)
        assert 0 < index < 0.1 * bytes_read(whole)
    columns = {column.head: column.values for column in measurements(table)}
    assert columns["read"] == [
        fmean(one.measured["read_bytes_per_step"] or 0 for one in run.records) for run in (full, made)
    ]
    assert columns["read\nof Full's"] == [None, fmean(shares)]


def test_an_answer_that_ends_early_is_profiled_as_far_as_it_goes(tmp_path: Path) -> None:
    with attached(tiny("llama"), PQ, budget=40) as kv:
        engine = Engine(kv)
        engine.tracer = Tracer(torch.device("cpu"), tmp_path / PROFILE)
        made = engine.generate(prompt(100), max_new_tokens=3)
        assert made.trace["steps"] == 1  # the other of the two was profiled
        assert engine.generate(prompt(100), max_new_tokens=1).trace is None
        cache = kv.cache(capacity=10)
        with engine.tracer.step(cache):
            assert all("decode" in vars(layer) for layer in cache.layers)
        assert not any("decode" in vars(layer) for layer in cache.layers)
    assert "decode step" in names_in(tmp_path / PROFILE)
    assert [file.name for file in tmp_path.iterdir()] == [PROFILE]


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


def test_jobs_that_share_a_prefill_are_traced_each(tmp_path: Path) -> None:
    settings = Settings(results=Results(root=str(tmp_path)), trace="on", shared_prefill=True)
    for made in evaluate_together([Job.plan(PQ, niah(), MODEL, settings)]):
        assert all(record.trace and record.trace["parts_s"]["attend"] > 0 for record in made.records)
        assert (made.folder / PROFILE).exists()
