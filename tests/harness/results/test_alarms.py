"""Alarms of a table: each where it is planted and only there; rarely one in tables that hold no difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.reports.document import as_markdown, as_rows, as_text
from harness.reports.page import page
from harness.results.alarms import AlarmRow, alarms
from harness.results.records import Record
from harness.results.run_folder import StoredRun
from tests.fake_records import config, record, records, rewrite, table_of, write_run

SPARSE = {"attended_prompt": 10.0, "attended_total": 12.0}
SIZE = 30
Floats = NDArray[np.float64]


def row(
    method: str, lines: Sequence[Record], full: AlarmRow | None = None, p: float | None = None, **facts: Any
) -> AlarmRow:
    """Return a row. `facts`: settings of the run; `info`: of run.json; `title`; `trace`: of the summary."""
    info, title = facts.pop("info", {}), facts.pop("title", method)
    known = {"method": method, "task_info": {"version": "1"}} | info
    trace = facts.pop("trace", None)
    run = StoredRun(Path(title), config(method, **facts), known, list(lines), "complete")
    ours, theirs = (np.mean([line.score for line in some]) for some in (lines, full.run.records if full else lines))
    summary = {
        "method": method,
        "budget": {"asked": run.config["budget"]},
        "full": {"diff": ours - theirs},
        "simulated": bool(info.get("simulated")),
        "host_is_cpu": bool(info.get("host_is_cpu")),
        "memory": {"kv_host_bytes": max(line["kv_host_bytes"] for line in lines)},
        "trace": trace,
    }
    return AlarmRow(title, run, full.run if full else None, summary, p)


def kinds(*rows: AlarmRow) -> list[tuple[str, tuple[str, ...]]]:
    return [(alarm.kind, alarm.rows) for alarm in alarms(rows)]


def test_above_full_by_the_p_that_the_table_stars(tmp_path: Path) -> None:
    """Seven gains and no loss are p = 0.016: an alarm alone, none as one of six comparisons."""
    half = records([0.0] * 7 + [1.0] * 7)
    write_run(tmp_path, half)
    write_run(tmp_path, records([1.0] * 14, **SPARSE), "quest")
    alone = table_of(tmp_path)
    assert [(alarm.kind, alarm.count, alarm.of, alarm.rows) for alarm in alone.alarms] == [
        ("above_full", 1, 2, ("quest 10%",))
    ]
    for method in ("h2o", "snapkv", "sparq", "pqcache", "oracle"):
        lines = [
            record(f"e{i}", score=one.score, tokens=[i, len(method), 0, 0], **SPARSE) for i, one in enumerate(half)
        ]
        write_run(tmp_path, lines, method)
    six = table_of(tmp_path)
    assert sum(entry.score_p is not None for entry in six.entries) == 6
    assert six.alarms == []


def test_the_same_outputs_as_full_at_a_partial_budget() -> None:
    full = row("full", records([0.0] * 30))
    [alarm] = alarms([full, row("quest", records([0.0] * 30, **SPARSE), full)])
    assert (alarm.kind, alarm.count, alarm.of, alarm.red) == ("same_as_full", 1, 2, True)
    assert not alarms([full, row("quest", records([0.0] * 30), full, budget=None)])  # everything was read
    other = [*records([0.0] * 29, **SPARSE), record("e29", tokens=[9, 9, 9, 9], score=0.0, **SPARSE)]
    assert not alarms([full, row("quest", other, full)])
    known = row("full", records([1.0] * 30))
    assert not alarms([known, row("quest", records([1.0] * 30, **SPARSE), known)])  # right answers are alike
    few = row("full", records([0.0] * 12))
    assert not alarms([few, row("quest", records([0.0] * 12, **SPARSE), few)])  # 48 tokens


def test_a_full_that_is_near_guessing() -> None:
    full = row("full", records([0.3] * 4))
    near, far = ({"task_info": {"chance": chance}} for chance in (0.25, 0.0))
    assert kinds(full, row("quest", records([0.0, 0.3, 0.3, 0.6]), full, info=near)) == [("at_chance", ("quest",))]
    assert not kinds(full, row("quest", records([0.0, 0.3, 0.3, 0.6]), full, info=far))


@pytest.mark.parametrize(
    ("facts", "other", "word"),
    [
        ({"budget": 0.1}, {"budget": 10}, "budget=a share: a; budget=a number of tokens: b"),
        ({}, {"budget_rule": "paper"}, "budget_rule=read: a; budget_rule=paper: b"),
        ({}, {"budget_rule": "moved_bytes"}, "budget=a share: a; budget=a share (budget_rule=moved_bytes): b"),
        ({"dense_layers": [0]}, {"dense_layers": []}, "dense_layers=[0]: a; dense_layers=[]: b"),
    ],
)
def test_budgets_that_mean_something_else(facts: dict[str, Any], other: dict[str, Any], word: str) -> None:
    use = {"info": {"budget_use": {"paper_leaves_out": True}}}
    lines, parted = records([1.0, 0.0], **SPARSE), records([0.0, 1.0], **SPARSE)
    first = row("quest", lines, title="a", **facts | use)
    [alarm] = alarms([first, row("h2o", parted, title="b", **other | use)])
    assert (alarm.kind, alarm.reason, alarm.red) == ("budgets_differ", word, False)
    assert not alarms([row("full", lines), first])  # Full has no budget, and so no rule
    unused = {"info": {"budget_use": {"paper_leaves_out": False}}}
    assert bool(alarms([first, row("h2o", parted, title="b", **other | unused)])) == (other != {"budget_rule": "paper"})


def test_simulated_cells_are_named() -> None:
    host = records([1.0, 0.0], kv_host_bytes=5)
    on_cpu, shared = {"host_is_cpu": True}, {"simulated": True}
    assert kinds(row("full", records([1.0]), info=on_cpu), row("pqcache", host, budget=None, info=on_cpu)) == [
        ("simulated", ("pqcache",))
    ]
    assert not kinds(row("pqcache", host, budget=None, info={"host_is_cpu": False}))
    [times] = alarms([row("full", host, title=name, info=shared) for name in "ab"])
    assert times.text.startswith("all rows: ")
    assert kinds(row("full", host, info={"weights": "random"})) == [("simulated", ("full",))]
    assert not kinds(row("full", host, info={"weights": "embedded"}))


def session(
    load: float | None, ended: float | None = None, *, threads: int | None = 2, cpus: int = 2
) -> dict[str, Any]:
    """Return what run.json says of a session."""
    loads = {} if load is None else {"load_average": [load, 0.0, 0.0]}
    machine = {"cpu": "A CPU", "memory_bytes": 1, "cpus_usable": cpus, "threads": threads} | loads
    return {"provenance": {"machine": machine}} | ({} if ended is None else {"load_average_ended": [ended, 0.0, 0.0]})


@pytest.mark.parametrize(
    ("info", "settings", "is_shared"),
    [
        (session(2.4), {}, False),  # its own threads, and what a system makes
        (session(2.6), {}, True),
        (session(1.4, threads=1), {}, False),
        (session(2.0, threads=1), {}, True),
        (session(30.0, threads=28, cpus=32), {}, False),
        (session(33.0, threads=28, cpus=32), {}, True),
        (session(3.4), {"history": "store"}, False),  # a thread reads and writes
        (session(3.4), {"placement": "disk"}, False),
        (session(2.6, threads=None), {}, True),
        (session(6.0, threads=1, cpus=8), {"device": "cuda"}, False),  # the host of a GPU has CPUs left
        (session(9.0, threads=1, cpus=8), {"device": "cuda"}, True),
        (session(None), {}, False),
        (session(1.0, 2.0), {}, False),
        (session(1.0, 5.0), {}, True),  # others came later
        (session(0.1) | {"earlier": [session(9.0)]}, {}, True),
        (session(9.0) | {"simulated": True}, {}, False),  # no times
        (session(9.0) | {"simulated": True}, {"trace": {"step_s": 0.1}}, True),  # times of its steps
    ],
)
def test_load_beyond_a_runs_own_is_an_alarm(info: dict[str, Any], settings: dict[str, Any], is_shared: bool) -> None:
    raised = kinds(row("full", records([1.0]), info=info, **settings))
    assert (("shared_machine", ("full",)) in raised) == is_shared


@pytest.mark.parametrize(
    ("began", "ended", "changed", "is_apart"),
    [
        ("2026-01-01T10:50:00+00:00", "2026-01-01T11:00:00+00:00", {}, False),
        ("2026-01-01T12:11:00+00:00", "2026-01-01T12:20:00+00:00", {}, True),
        ("2026-01-01T08:00:00+00:00", "2026-01-01T08:59:00+00:00", {}, True),
        ("2026-01-01T10:05:00+00:00", "2026-01-01T10:20:00+00:00", {"cpu": "B CPU"}, True),
        ("2026-01-01T10:05:00+00:00", "2026-01-01T10:20:00+00:00", {"device_name": "H200"}, False),  # Full's is unknown
        (None, None, {}, False),
    ],
)
def test_times_of_full_come_from_the_same_machine_and_hours(
    began: str | None, ended: str | None, changed: dict[str, Any], is_apart: bool
) -> None:
    full_ran = session(None) | {"started": "2026-01-01T10:00:00+00:00", "ended": "2026-01-01T10:10:00+00:00"}
    ran = session(None) | {"started": began, "ended": ended}
    ran["provenance"]["machine"] |= changed
    full = row("full", records([1.0]), info=full_ran)
    other = row("quest", records([1.0]), full, info=ran)
    later = row("h2o", records([1.0]), full, info=session(None) | {"earlier": [ran]})
    assert kinds(full, other, later) == [("full_elsewhere", ("quest", "h2o"))] * is_apart
    assert not kinds(other)  # the table does not show Full's times


def test_every_form_of_a_report_says_that_the_machine_was_shared(tmp_path: Path) -> None:
    for method, load_average in (("full", 1.0), ("quest", 9.0)):
        write_run(tmp_path, records([1.0] * 3), method, facts=session(load_average))
    for path in tmp_path.glob("*/run.json"):  # the load here and now is no part of this
        rewrite(path.parent, load_average_ended=None)
    table = table_of(tmp_path)
    assert [line["stamps"] for line in as_rows([table])] == ["", "L"]
    for text in (as_text([table]), as_markdown([table]), page([table], [])):
        assert "Caution: quest 10%: " in text
        assert "L: load:" in text
