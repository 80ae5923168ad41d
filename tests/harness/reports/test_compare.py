"""Tables of random scores: what they say in one place they do not take back in another."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from evals import stats
from harness.reports.columns import notes, score_table
from harness.reports.compare import Comparison, ReportRow, comparisons
from harness.reports.spreadsheet import table_rows
from harness.results.run_folder import StoredRun, find, load
from harness.results.summary import summarise
from harness.terminal.tables import probability
from tests.fake_records import config, record, records, write_run

SPARSE = {"attended_prompt": 10.0, "attended_total": 12.0}
INFO = {"status": "complete", "task": "niah", "task_info": {"chance": 0.0, "metric": "recall"}}


def random_table(rng: np.random.Generator, folder: Path) -> Comparison:
    """Full and eight methods, 2 to 40 examples in one to three groups, scores right or wrong or in quarters."""
    size, groups, levels = rng.integers(2, 41), rng.integers(1, 4), rng.choice([1, 4])
    full = rng.integers(levels + 1, size=size) / levels
    scores = [full]
    for share in rng.random(8):
        scores.append(
            np.where(
                rng.random(size) < share, rng.integers(levels + 1, size=size) / levels * rng.random() // 0.25 / 4, full
            )
        )
    runs = []
    for values in scores:
        lines = [
            record(f"e{i}", group=f"g{i % groups}", score=float(value), **SPARSE) for i, value in enumerate(values)
        ]
        runs.append(StoredRun(folder, config("quest"), dict(INFO), lines, "complete"))
    rows = [summarise(r.records, config=r.config, info=INFO | {"method": "quest"}, full=runs[0].records) for r in runs]
    return Comparison(
        "t", "recall", [ReportRow(r, runs[0], row, "quest") for r, row in zip(runs[1:], rows[1:], strict=True)]
    )


def excludes_zero(ci: list[float]) -> bool:
    return ci[0] > 0 or ci[1] < 0


def test_no_table_contradicts_itself(tmp_path: Path) -> None:
    rng, marks, seen = np.random.default_rng(0), 0, 0
    for _ in range(12):
        table = random_table(rng, tmp_path)
        cells = {column.head: column.cells for column in score_table(table)}
        for number, entry in enumerate(table.entries):
            beside, seen = entry.summary["full"], seen + 1
            assert (beside["p"] < 0.05) == excludes_zero(beside["ci95"])
            assert number not in table.significant or excludes_zero(beside["ci95"])
            marks += number in table.significant
            ends = [float(end) for end in re.findall(r"[-+0-9.]+", cells["vs full"][number].partition("[")[2])]
            shown = cells["p"][number].rstrip("*").lstrip("<")
            assert excludes_zero(ends) == (float(shown) < 0.05)
    assert 10 < marks < seen  # the rule was tried on both sides


@pytest.mark.parametrize(("p", "shown"), [(0.04996, "0.0500"), (0.0504, "0.0504"), (0.049, "0.049"), (0.0001, "<.001")])
def test_p_shows_its_side_of_the_level(p: float, shown: str) -> None:
    assert probability(p) == shown


def table_of(folder: Path) -> Comparison:
    [table] = comparisons([load(path.parent) for path in folder.glob("*/run.json")])
    return table


def test_the_spreadsheet_has_p_as_the_table_corrects_it(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0] * 20))
    for budget, lost in ((0.1, 12), (0.2, 5), (0.3, 1)):
        scores = [0.0] * lost + [1.0] * (20 - lost)
        write_run(tmp_path, records(scores, attended_prompt=10.0), "quest", budget=budget)
    tables = comparisons([load(run) for run in find([tmp_path])])
    lines = table_rows(tables)
    assert lines[0]["full.p_holm"] is None  # Full itself
    assert [line["full.p_holm"] for line in lines[1:]] == stats.holm([line["full.p"] for line in lines[1:]])
    assert lines[1]["full.p_holm"] == pytest.approx(3 * lines[1]["full.p"])


def test_a_table_says_what_differs_from_full(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0] * 20))
    for budget, lost in ((0.1, 12), (0.3, 1)):
        write_run(tmp_path, records([0.0] * lost + [1.0] * (20 - lost), **SPARSE), "quest", budget=budget)
    told = list(notes(table_of(tmp_path)))
    assert "differs from Full: quest 10%" in told
    assert "cannot be told from Full by these prompts: quest 30%" in told
