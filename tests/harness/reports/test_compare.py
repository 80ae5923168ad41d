"""Tables of random scores do not contradict themselves; stamps; corrected p; methods held against methods."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals import stats
from evals.stats import shift
from harness.commands import report
from harness.reports.against import against
from harness.reports.columns import measurements
from harness.reports.compare import Comparison, ReportRow, comparisons, corrected
from harness.reports.conditions import conditions
from harness.reports.document import as_rows
from harness.reports.notes import notes, stamp_meanings, stamps
from harness.results.records import Record, StoreError
from harness.results.run_folder import StoredRun, find, load
from harness.results.summary import summarise
from harness.terminal.tables import probability
from tests.fake_records import config, record, records, write_run

SPARSE = {"attended_prompt": 10.0, "attended_total": 12.0}
INFO = {"status": "complete", "task": "niah", "task_info": {"chance": 0.0, "metric": "recall"}}


def table_of(root: Path) -> Comparison:
    [table] = comparisons([load(run) for run in find([root])])
    return table


def random_table(rng: np.random.Generator, folder: Path) -> Comparison:
    """Full and eight methods, 2 to 40 examples in one to three groups, scores right or wrong or in quarters."""
    size, groups, levels = rng.integers(2, 41), rng.integers(1, 4), rng.choice([1, 4])
    full = rng.integers(levels + 1, size=size) / levels
    scores = [full]
    for part in rng.random(8):
        changed, others = rng.random(size) < part, rng.integers(levels + 1, size=size) / levels
        scores.append(np.where(changed, others * rng.random() // 0.25 / 4, full))
    runs = []
    for values in scores:
        lines = [record(f"e{i}", group=f"g{i % groups}", score=float(v), **SPARSE) for i, v in enumerate(values)]
        runs.append(StoredRun(folder, config("quest"), dict(INFO), lines, "complete"))
    rows = [summarise(r.records, config=r.config, info=INFO | {"method": "quest"}, full=runs[0].records) for r in runs]
    entries = [ReportRow(r, runs[0], row, "quest") for r, row in zip(runs[1:], rows[1:], strict=True)]
    return Comparison("t", "recall", corrected(entries, has_scores=True))


def excludes_zero(ci: list[float]) -> bool:
    return ci[0] > 0 or ci[1] < 0


def test_no_table_contradicts_itself(tmp_path: Path) -> None:
    rng, marks, seen = np.random.default_rng(0), 0, 0
    for _ in range(12):
        table = random_table(rng, tmp_path)
        cells = {column.head: column.cells for column in measurements(table)}
        assert [entry.score_p for entry in table.entries] == stats.holm([e.summary["full"]["p"] for e in table.entries])
        for number, entry in enumerate(table.entries):
            full, seen = entry.summary["full"], seen + 1
            assert (full["p"] < 0.05) == excludes_zero(full["ci95"])
            assert not entry.score_differs or excludes_zero(full["ci95"])
            marks += entry.score_differs
            ends = [float(end) for end in re.findall(r"[-+0-9.]+", cells["vs full"][number].partition("[")[2])]
            shown = cells["p"][number].rstrip("*").lstrip("<")
            assert excludes_zero(ends) == (float(shown) < 0.05)
    assert 10 < marks < seen  # the rule was tried on both sides


@pytest.mark.parametrize(("p", "shown"), [(0.04996, "0.0500"), (0.0504, "0.0504"), (0.049, "0.049"), (0.0001, "<.001")])
def test_p_shows_its_side_of_the_level(p: float, shown: str) -> None:
    assert probability(p) == shown


@pytest.mark.parametrize(
    ("stamp", "lines", "changes"),
    [
        ("", {}, {"facts": {"host_is_cpu": True}}),  # nothing lies there
        ("S", {}, {"facts": {"simulated": True}}),
        ("T", {}, {"trace": "on"}),
        ("HD", {"kv_host_bytes": 10, "kv_disk_bytes": 10}, {"facts": {"host_is_cpu": True}}),
        ("", {"kv_disk_bytes": 10}, {"facts": {"host_is_cpu": False}}),
        ("X", {"lost_turns": 2, "lost_to": "the disk is full"}, {}),
        ("P", {}, {"facts": {"plain_steps": "a step waits for a value"}}),
        ("C", {}, {"facts": {"earlier": [{"status": "interrupted", "started": "2026-01-01T00:00:00+00:00"}]}}),
        ("F", {}, {"status": "failed"}),
        ("!", {"stop": "length"}, {}),
    ],
)
def test_a_row_has_its_stamp(tmp_path: Path, stamp: str, lines: dict[str, Any], changes: dict[str, Any]) -> None:
    status = changes.pop("status", "complete")
    write_run(tmp_path, records([1.0] * 12, **lines), "full", status, **changes)
    table = table_of(tmp_path)
    assert stamps(table.entries[0], table) == stamp
    legend = {f"{letter}: {meaning}": letter for letter, meaning in stamp_meanings().items()}
    assert [legend[note] for note in notes(table) if note in legend] == [*stamp.replace("!", "")]


def test_conditions_say_which_row_differs(tmp_path: Path) -> None:
    for budget in (0.1, 0.2, 0.3):
        write_run(tmp_path, records([0.0]), "quest", budget=budget, chat="none")
    lines = [record(f"{t}", prompt_tokens=t, data={"length": 2048}) for t in (1315, 1320, 2040)]
    write_run(tmp_path, lines, dtype="bf16", device="cuda", chat="none")
    prompts, machine, _, settings = conditions(table_of(tmp_path))
    assert "1315 to 2040 tokens" in prompts
    assert [part.rpartition("but ")[2] for part in machine.split("; ")[:2]] == ["bf16 (full)", "cuda (full)"]
    assert settings == "settings: seed=0, chat=none"


GOOD, BAD = [1.0] * 12, [0.0] * 8 + [1.0] * 4
CHEAP, DEAR = [0.1 + 0.01 * i for i in range(12)], [0.9 + 0.02 * i for i in range(12)]


def scored(scores: list[float], costs: list[float]) -> list[Record]:
    return [
        record(f"e{i}", score=score, tokens=[i, 1, 2, int(score)], attended_prompt=10.0, answer_nll=cost)
        for i, (score, cost) in enumerate(zip(scores, costs, strict=True))
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for budget in (0.1, 0.2):
        write_run(tmp_path, scored(GOOD, CHEAP), "snapkv", budget=budget)
        write_run(tmp_path, scored(BAD, DEAR), "quest", budget=budget)
    write_run(tmp_path, scored(BAD, DEAR), "h2o", budget=0.3)
    return tmp_path


def test_a_method_stands_for_its_row_of_the_same_budget(root: Path) -> None:
    [table] = against([table_of(root)], "snapkv")
    others = [entry.label.removeprefix("quest against ") for entry in table.entries]
    assert others == ["snapkv 10%", "snapkv 20%"]
    score, cost = stats.paired(BAD, GOOD, [""] * 12), shift(DEAR, CHEAP)
    rows = as_rows([table])
    for row in rows:
        assert (row["full.diff"], row["full.p"]) == (score.diff, score.p)
        assert (row["likelihood.full.diff"], row["likelihood.full.p"]) == (pytest.approx(cost.diff), cost.p)
    keys = ("full", "likelihood.full")
    adjusted = stats.holm([row[f"{key}.p"] for key in keys for row in rows])
    assert [row[f"{key}.p_holm"] for key in keys for row in rows] == adjusted


def test_a_row_may_be_named_with_its_budget_or_wrongly(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [table] = against([table_of(root)], "snapkv 20%")
    others = ["h2o 30%", "quest 10%", "quest 20%", "snapkv 10%"]
    assert [entry.label.partition(" ")[0] + f" {entry.title.rpartition(' ')[2]}" for entry in table.entries] == others
    with pytest.raises(StoreError, match="mean snapkv"):
        against([table_of(root)], "snapvk")
    assert report.main([str(root), "--against", "quest 10%", "--tex", str(root / "x.tex")]) == 0
    assert "Against quest 10%:" in capsys.readouterr().out
    tex = (root / "x.tex").read_text()
    assert r"Against quest 10\%:" in tex
    assert tex.count(r"\begin{table}") == tex.count(r"\end{table}")
