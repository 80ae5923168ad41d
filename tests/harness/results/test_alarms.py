"""Alarms of a table: each where it is planted and only there; rarely one in tables that hold no difference."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evals import stats
from harness.reports.compare import comparisons
from harness.results.alarms.alarm import Alarm, AlarmRow
from harness.results.alarms.table import alarms
from harness.results.records import Record
from harness.results.run_folder import StoredRun, load
from tests.fake_records import config, record, records, write_run

SPARSE = {"attended_prompt": 10.0, "attended_total": 12.0}
SIZE = 30


def row(
    method: str, lines: Sequence[Record], full: AlarmRow | None = None, p: float | None = None, **facts: Any
) -> AlarmRow:
    """`facts`: settings of the run; `info`: of run.json; `title`."""
    info, title = facts.pop("info", {}), facts.pop("title", method)
    known = {"method": method, "task_info": {"version": "1"}} | info
    run = StoredRun(Path(title), config(method, **facts), known, list(lines), "complete")
    ours, theirs = (np.mean([line.score for line in some]) for some in (lines, full.run.records if full else lines))
    asked = run.config["budget"]
    summary = {
        "method": method,
        "budget": {"asked": asked, "layers": facts.get("layer_budgets")},
        "full": {"diff": ours - theirs},
        "simulated": bool(info.get("simulated")),
        "host_is_cpu": bool(info.get("host_is_cpu")),
        "memory": {"kv_host_bytes": max(line.kv["host"] for line in lines)},
    }
    return AlarmRow(title, run, full.run if full else None, summary, p)


def kinds(found: Sequence[Alarm]) -> list[str]:
    return [alarm.kind for alarm in found]


# by simulation

Floats = NDArray[np.float64]


def quarters(rng: np.random.Generator, size: int = SIZE) -> Floats:
    return rng.choice(5, p=[0.1, 0.2, 0.2, 0.2, 0.3], size=size) / 4


def table(rng: np.random.Generator, full: Floats, methods: Sequence[Floats]) -> list[AlarmRow]:
    """Outputs differ as scores do; p as a table stars it."""
    p = stats.holm([stats.p_value(list(one), list(full)) for one in methods])
    first = row("full", _lines(rng, full))
    named = zip(("quest", "h2o", "snapkv", "sparq", "pqcache", "oracle"), methods, p, strict=False)
    return [first, *(row(name, _lines(rng, scores, **SPARSE), first, corrected) for name, scores, corrected in named)]


def _lines(rng: np.random.Generator, scores: Floats, **changes: Any) -> list[Record]:
    words = rng.integers(0, 1000, (len(scores), 8)).tolist()
    return [
        record(f"e{i}", score=float(score), tokens=words[i], token_s=[1.0] * 8, **changes)
        for i, score in enumerate(scores)
    ]


@pytest.mark.slow
def test_tables_without_a_difference_rarely_raise_an_alarm() -> None:
    """200 tables of six methods as good as Full, at most 16 (8 %) raise one."""
    rng, raised = np.random.default_rng(11), 0
    for _ in range(200):
        full = quarters(rng)
        methods = [np.where(rng.random(SIZE) < 0.6, quarters(rng), full) for _ in range(6)]
        raised += bool(alarms(table(rng, full, methods)))
    assert raised <= 16


# one by one


def test_above_full_by_the_p_that_the_table_stars(tmp_path: Path) -> None:
    """Seven gains and no loss are p = 0.016: an alarm alone, none as one of six comparisons."""
    half = records([0.0] * 7 + [1.0] * 7)
    write_run(tmp_path, half)
    write_run(tmp_path, records([1.0] * 14, **SPARSE), "quest")
    [alone] = comparisons([load(path.parent) for path in tmp_path.glob("*/run.json")])
    assert [(alarm.kind, alarm.count, alarm.of, alarm.rows) for alarm in alone.alarms] == [
        ("above_full", 1, 2, ("quest 10%",))
    ]
    assert alone.alarms[0].text.startswith("quest 10%: score above Full")
    for method in ("h2o", "snapkv", "sparq", "pqcache", "oracle"):
        lines = [
            record(f"e{i}", score=one.score, tokens=[i, len(method), 0, 0], **SPARSE) for i, one in enumerate(half)
        ]
        write_run(tmp_path, lines, method)
    [six] = comparisons([load(path.parent) for path in tmp_path.glob("*/run.json")])
    assert len(six.tested) == 6
    assert six.alarms == []


def test_the_same_outputs_as_full_at_a_partial_budget() -> None:
    wrong, right = records([0.0] * 30), records([1.0] * 30)
    full = row("full", wrong)
    [alarm] = alarms([full, row("quest", records([0.0] * 30, **SPARSE), full)])
    assert (alarm.kind, alarm.count, alarm.of, alarm.red) == ("same_as_full", 1, 2, True)
    assert alarm.text.startswith("quest: all outputs are Full's though only a part was read")
    assert not alarms([full, row("quest", records([0.0] * 30), full, budget=None)])  # everything was read
    other = [*records([0.0] * 29, **SPARSE), record("e29", tokens=[9, 9, 9, 9], score=0.0, **SPARSE)]
    assert not alarms([full, row("quest", other, full)])
    known = row("full", right)
    assert not alarms([known, row("quest", records([1.0] * 30, **SPARSE), known)])  # right answers are alike
    few = row("full", records([0.0] * 12))
    assert not alarms([few, row("quest", records([0.0] * 12, **SPARSE), few)])  # 48 tokens


def test_a_full_that_is_near_guessing() -> None:
    full = row("full", records([0.3] * 4))
    near, far = ({"task_info": {"chance": chance}} for chance in (0.25, 0.0))
    [alarm] = alarms([full, row("quest", records([0.0, 0.3, 0.3, 0.6]), full, info=near)])
    assert (alarm.kind, alarm.count, alarm.of, alarm.rows, alarm.red) == ("at_chance", 1, 2, ("quest",), False)
    assert not alarms([full, row("quest", records([0.0, 0.3, 0.3, 0.6]), full, info=far)])


@pytest.mark.parametrize(
    ("facts", "other", "word"),
    [
        ({"budget": 0.1}, {"budget": 10}, "budget=a share: a; budget=a number of tokens: b"),
        ({}, {"budget_rule": "paper"}, "budget_rule=read: a; budget_rule=paper: b"),
        ({}, {"align": "moved_bytes"}, "align=tokens: a; align=moved_bytes: b"),
        ({"dense_layers": [0]}, {"dense_layers": []}, "dense_layers=[0]: a; dense_layers=[]: b"),
    ],
)
def test_budgets_that_mean_something_else(facts: dict[str, Any], other: dict[str, Any], word: str) -> None:
    use = {"info": {"budget_use": {"paper_leaves_out": True}}}
    lines, parted = records([1.0, 0.0], **SPARSE), records([0.0, 1.0], **SPARSE)
    found = alarms([row("quest", lines, title="a", **facts | use), row("h2o", parted, title="b", **other | use)])
    assert [alarm.kind for alarm in found] == ["budgets_differ"]
    assert word in found[0].text
    assert not found[0].red
    full = row("full", lines)  # has no budget, and so no rule
    assert not alarms([full, row("quest", lines, title="a", **facts | use)])


def test_a_rule_that_changes_nothing_for_a_method_is_no_difference() -> None:
    lines = records([1.0, 0.0], **SPARSE)
    first = row("quest", lines, info={"budget_use": {"paper_leaves_out": False}})
    second = row("h2o", lines, info={"budget_use": {"paper_leaves_out": True}}, budget_rule="paper")
    assert not alarms([first, second])


def test_one_split_of_the_budget_for_some_methods_alone() -> None:
    lines = records([1.0, 0.0], **SPARSE)

    def use(typed: bool, **windows: float) -> dict[str, Any]:
        return {"budget_use": {"paper_leaves_out": False, "windows": windows, "windows_typed": typed}}

    own = [row("quest", lines, info=use(False, sinks=1)), row("h2o", lines, info=use(False, sinks=9))]
    assert not alarms(own)  # each as its paper has it
    mixed = [
        row("quest", lines, info=use(True, sinks=4, recent_ratio=0.5)),
        row("h2o", lines, info=use(False, sinks=9)),
    ]
    [alarm] = alarms(mixed)
    assert "sinks=4: quest; sinks=9: h2o" in alarm.text
    common = [
        row("quest", lines, info=use(True, sinks=4, recent_ratio=0.5)),
        row("h2o", lines, info=use(True, sinks=4)),
    ]
    assert not alarms(common)
    ablation = [row("quest", lines, title=f"quest sinks={n}", info=use(n > 1, sinks=n)) for n in (1, 4)]
    assert not alarms(ablation)


def test_simulated_cells_are_named() -> None:
    host = records([1.0, 0.0], kv_host_bytes=5)
    on_cpu, shared = {"host_is_cpu": True}, {"simulated": True}
    [bus] = alarms([row("full", records([1.0]), info=on_cpu), row("pqcache", host, budget=None, info=on_cpu)])
    assert (bus.kind, bus.rows, bus.red) == ("simulated", ("pqcache",), False)
    assert "no transfer" in bus.text
    assert not alarms([row("pqcache", host, budget=None, info={"host_is_cpu": False})])
    [times] = alarms([row("full", host, title=name, info=shared) for name in "ab"])
    assert times.text == "all rows: the prefill was shared, so no times"
    [random] = alarms([row("full", host, info={"weights": "random"})])
    assert "random weights" in random.text
    assert not alarms([row("full", host, info={"weights": "embedded"})])


def test_a_run_notes_what_its_alarms_need(cli: Callable[..., Any], tmp_path: Path) -> None:
    code, _, err = cli("method=h2o", "windows.sinks=4", "budget=0.5", "task.depths=1")
    assert code == 0, err
    [table] = comparisons([load(path.parent) for path in tmp_path.glob("runs/*/run.json")])
    assert "all rows: random weights, so scores mean nothing" in [alarm.text for alarm in table.alarms]
    [file] = tmp_path.glob("runs/niah-h2o-*/run.json")
    info = json.loads(file.read_text())
    assert info["weights"] == "random"
    assert info["budget_use"]["windows"]["sinks"] == 4
    assert info["budget_use"]["windows_typed"]
