"""Times that others had a part in: by the load beyond a run's own, or by a row that ran beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.reports.compare import Comparison, comparisons
from harness.reports.costs import PANELS
from harness.reports.document import as_latex, as_text
from harness.reports.page.data import page_data
from harness.reports.spreadsheet import table_rows
from harness.reports.stamps import stamps
from harness.results.alarms.alarm import AlarmRow
from harness.results.alarms.times import full_elsewhere, shared
from harness.results.run_folder import StoredRun, load
from tests.fake_records import config, records, rewrite, write_run


def machine(load: float | None = None, *, threads: int | None = 2, cpus: int = 2, **changes: Any) -> dict[str, Any]:
    loads = {} if load is None else {"load_average": [load, 0.0, 0.0]}
    return {"cpu": "A CPU", "memory_bytes": 1, "cpus_usable": cpus, "threads": threads} | loads | changes


def session(minutes: tuple[int, int] = (0, 1), pid: int = 1, host: str = "here", **of_machine: Any) -> dict[str, Any]:
    """What run.json says of one; the load with which it ended is `ended`."""
    began, over = (f"2026-01-01T00:{minute:02}:00+00:00" for minute in minutes)
    ended = {"load_average_ended": [of_machine.pop("ended"), 0.0, 0.0]} if "ended" in of_machine else {}
    known = {"machine": machine(**of_machine), "process": {"host": host, "pid": pid}}
    return {"started": began, "ended": over, "provenance": known} | ended


def row(title: str, info: dict[str, Any], *, simulated: bool = False, trace: Any = None, **settings: Any) -> AlarmRow:
    run = StoredRun(Path(title), config(**settings), info, records([1.0]), "complete")
    return AlarmRow(title, run, None, {"simulated": simulated, "trace": trace})


def raised(*rows: AlarmRow) -> tuple[str, ...]:
    return tuple(one.title for one in shared(rows))


@pytest.mark.parametrize(
    ("told", "settings"),
    [
        ({"load": 2.4}, {}),  # its own threads, and what a system makes
        ({"load": 1.4, "threads": 1}, {}),
        ({"load": 30.0, "threads": 28, "cpus": 32}, {}),
        ({"load": 3.4}, {"history": "store"}),  # a thread reads and writes
        ({"load": 3.4}, {"placement": "disk"}),
        ({"load": 2.0, "threads": None}, {}),  # torch was not asked
        ({"load": 6.0, "threads": 1, "cpus": 8}, {"device": "cuda"}),  # the host of a GPU has CPUs left
        ({"load": None}, {}),
        ({"load": 1.0, "ended": 2.0}, {}),
    ],
)
def test_a_runs_own_load_is_no_alarm(told: dict[str, Any], settings: dict[str, Any]) -> None:
    assert not raised(row("full", session(**told), **settings))


@pytest.mark.parametrize(
    ("told", "settings"),
    [
        ({"load": 2.6}, {}),
        ({"load": 2.0, "threads": 1}, {}),
        ({"load": 33.0, "threads": 28, "cpus": 32}, {}),
        ({"load": 2.6, "threads": None}, {}),
        ({"load": 9.0, "threads": 1, "cpus": 8}, {"device": "cuda"}),
        ({"load": 1.0, "ended": 5.0}, {}),  # others came later
    ],
)
def test_load_beyond_a_runs_own_is_one(told: dict[str, Any], settings: dict[str, Any]) -> None:
    assert raised(row("full", session(**told), **settings)) == ("full",)


def test_an_earlier_session_counts() -> None:
    info = session(load=0.1) | {"earlier": [session(load=9.0)]}
    assert raised(row("full", info)) == ("full",)


def test_rows_without_times_need_no_caution() -> None:
    busy = session(load=9.0)
    assert not raised(row("full", busy, simulated=True))
    assert raised(row("full", busy, simulated=True, trace={"step_s": 0.1})) == ("full",)  # times of its steps


def test_rows_that_ran_side_by_side() -> None:
    first = row("a", session((0, 10), pid=1))
    assert raised(first, row("b", session((9, 20), pid=2))) == ("a", "b")
    assert not raised(first, row("b", session((10, 20), pid=2)))  # one after the other
    assert not raised(first, row("b", session((9, 20), pid=1)))  # one process does one thing at a time
    assert not raised(first, row("b", session((9, 20), pid=2, host="there")))
    assert not raised(first, row("b", session((9, 20), pid=2, memory_bytes=2)))  # another host of the same name
    assert raised(first, row("b", session((9, 20), pid=2), simulated=True)) == ("a",)  # it worked, too
    assert not raised(first, row("b", {"started": "2026-01-01T00:05:00+00:00"}))  # nobody knows where


def test_workers_with_a_gpu_each_do_not_meet() -> None:
    first = row("a", session((0, 10), pid=1, device_id="GPU-1"), device="cuda")
    assert not raised(first, row("b", session((0, 10), pid=2, device_id="GPU-2"), device="cuda"))
    assert raised(first, row("b", session((0, 10), pid=2, device_id="GPU-1"), device="cuda")) == ("a", "b")
    assert not raised(
        row("a", session((0, 10), pid=1), device="cuda"), row("b", session((0, 10), pid=2), device="cuda")
    )


@pytest.mark.parametrize(
    ("info", "apart"),
    [
        (session((5, 10)), False),
        (session((0, 3)), False),  # at the same time, which is another caution
        (
            session((5, 10)) | {"started": "2026-01-01T02:01:00+00:00", "ended": "2026-01-01T02:20:00+00:00"},
            True,
        ),
        (
            session((5, 10)) | {"started": "2025-12-31T20:00:00+00:00", "ended": "2025-12-31T21:00:00+00:00"},
            True,
        ),
        (session((5, 10)) | {"earlier": [session() | {"ended": "2025-12-31T22:00:00+00:00"}]}, True),
        (session((5, 10), host="there"), True),
        (session((5, 10), cpu="B CPU"), True),
        (session((5, 10), device_name="H200"), False),  # older runs do not say it
        ({}, False),
    ],
)
def test_fulls_times_are_of_the_same_machine_and_hours(info: dict[str, Any], apart: bool) -> None:
    full = row("full", session())
    run = row("quest", info)._replace(full=full.run)
    found = full_elsewhere([full, run, row("h2o", session())._replace(full=full.run)])
    assert [one.title for one in found] == ["quest"] * apart
    simulated = row("full", session(), simulated=True)
    assert not full_elsewhere([simulated, run])  # Full shows no times
    assert not full_elsewhere([run])  # nor is it in the table


def busy_table(root: Path) -> Comparison:
    """Full ran alone, Quest did not."""
    write_run(root, records([1.0] * 3), facts={"provenance": {"machine": machine(1.0)}})
    write_run(root, records([1.0] * 3), "quest", facts={"provenance": {"machine": machine(9.0)}})
    for path in root.glob("*/run.json"):  # the load here and now is no part of this
        rewrite(path.parent, load_average_ended=None)
    [table] = comparisons([load(path.parent) for path in root.glob("*/run.json")])
    return table


def test_every_form_of_a_report_says_it(tmp_path: Path) -> None:
    table = busy_table(tmp_path)
    assert [stamps(entry, table) for entry in table.entries] == ["", "L"]
    beneath = "others used the machine while these ran, so their times mean little: quest 10%"
    text = " ".join(as_text([table]).split())
    assert "caution: quest 10%: others used the machine, so times mean little" in text
    assert "L: load: others used the machine while it ran" in text
    assert beneath in text  # the table of costs has no stamps
    assert beneath in as_text([table], markdown=True)
    assert beneath.replace("%", r"\%") in as_latex([table])
    assert [line["stamps"] for line in table_rows([table])] == ["", "L"]
    [page] = page_data([table], [], "today")["tables"]
    assert page["caution"] == beneath
    assert [panel["name"] for panel in page["panels"] if panel["timed"]] == ["median time per output token (ms)"]


def test_latex_prints_what_a_reader_must_know(tmp_path: Path) -> None:
    """Nothing of it needs another package than booktabs and graphicx."""
    lines = as_latex([busy_table(tmp_path)]).splitlines()
    printed = " ".join(line for line in lines if not line.startswith("%"))
    assert r"Caution: quest 10\%: others used the machine, so times mean little" in printed
    assert "L: load: others used the machine while it ran" in printed
    assert "Torch: unknown" in printed
    labels = [line for line in lines if line.startswith(r"\label{tab:")]
    assert labels[0] == r"\label{tab:scores-niah-tiny-protocol-prompt}"
    assert len(set(labels)) == len(labels) == sum(line == r"\begin{table}" for line in lines)


def test_latex_prints_what_an_exclamation_mark_points_to(tmp_path: Path) -> None:
    run = write_run(tmp_path, records([1.0] * 3, stop="length"))
    text = as_latex(comparisons([load(run)]))
    assert r"\raggedright !: examples ran into the token limit: full 3/3." in text


def test_a_picture_says_it_below_the_times_alone(tmp_path: Path) -> None:
    table = busy_table(tmp_path)
    rows = [entry.summary | {"label": entry.label, "stamps": stamps(entry, table)} for entry in table.entries]
    told = [panel.name for panel in PANELS if "others used the machine for 1 of 2 points" in panel.title(rows)]
    assert told == ["median time per output token (ms)"]
