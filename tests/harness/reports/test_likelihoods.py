"""Likelihoods of right answers beside scores: the same numbers in summary, table, note, page and CSV."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from evals import stats
from evals.stats import shift
from harness.reports.columns import notes, score_table
from harness.reports.compare import Comparison, comparisons
from harness.reports.document import as_text
from harness.reports.likelihoods import likelihood_table, signed
from harness.reports.page.data import page_data
from harness.reports.spreadsheet import table_rows
from harness.results.records import Record
from harness.results.run_folder import find, load
from harness.results.summary import likelihood
from tests.fake_records import record, write_run

FULL = [0.1 + 0.01 * i for i in range(12)]
LOSSES = {0.1: [0.5 + 0.1 * i for i in range(12)], 0.2: [0.001 * (-1) ** i * (i + 1) for i in range(12)]}


def lines(costs: list[float | None], **changes: object) -> list[Record]:
    groups = ["a"] * 8 + ["b"] * 4
    return [
        record(f"{i}", score=1.0, group=group, tokens=[i, 1, 2, 3], answer_nll=cost, **changes)
        for i, (cost, group) in enumerate(zip(costs, groups, strict=True))
    ]


@pytest.fixture
def table(tmp_path: Path) -> Comparison:
    """Full, and one method at a budget that costs and at one that does not; all answers are right."""
    write_run(tmp_path, lines(list(FULL)))
    for budget, losses in LOSSES.items():
        costs = [full + loss for full, loss in zip(FULL, losses, strict=True)]
        write_run(tmp_path, lines(list(costs), attended_prompt=10.0), "quest", budget=budget)
    [made] = comparisons([load(run) for run in find([tmp_path])])
    return made


def test_the_summary_holds_means_over_groups_and_the_paired_test(table: Comparison) -> None:
    section = table.entries[1].summary["likelihood"]
    costs = [full + loss for full, loss in zip(FULL, LOSSES[0.1], strict=True)]
    wanted = shift(costs, FULL)
    assert wanted.ci is not None
    assert section["mean"] == pytest.approx((fmean(costs[:8]) + fmean(costs[8:])) / 2)
    assert section["n"] == section["full"]["n"] == 12
    assert section["full"]["mean_diff"] == pytest.approx(fmean(LOSSES[0.1]))
    assert (section["full"]["diff"], section["full"]["p"]) == (pytest.approx(wanted.diff), wanted.p)
    assert section["full"]["ci95"] == pytest.approx([wanted.ci.low, wanted.ci.high])
    assert table.entries[0].summary["likelihood"]["full"] is None


def test_what_has_no_cost_does_not_count() -> None:
    some, none = lines([None, *FULL[1:]]), lines([None] * 12)
    assert likelihood(none, none) is None
    found = likelihood(some, lines([*FULL[:11], None]))
    assert found is not None
    assert (found["n"], found["full"]["n"], found["full"]["p"]) == (11, 10, 1.0)


def test_holms_correction_is_over_scores_and_likelihoods(table: Comparison) -> None:
    """No score differs, and one of two likelihoods does: of four tests."""
    rows = table_rows([table])
    adjusted = stats.holm([*(row["full.p"] for row in rows[1:]), *(row["likelihood.full.p"] for row in rows[1:])])
    assert [row["full.p_holm"] for row in rows[1:]] == adjusted[:2]
    assert [row["likelihood.full.p_holm"] for row in rows[1:]] == adjusted[2:]
    assert (table.significant, table.significant_costs) == (set(), {1})
    assert any("scores and likelihoods together" in note for note in notes(table))


def test_every_form_of_the_table_shows_them(table: Comparison) -> None:
    [column] = [column for column in score_table(table) if column.head == "NLL vs full"]
    assert column.cells[0] == ""
    assert column.cells[1].startswith("+1.05 [+")
    assert column.cells[1].endswith("]*")
    assert "[-0.0" in column.cells[2]
    own = {column.head: column.cells for column in likelihood_table(table)}
    assert own["mean"] == ["", "+1.05", "-5e-04"]
    assert own["n"] == ["12"] * 3
    assert column.cells[1] in as_text([table])
    blocks = [block["name"] for block in page_data([table], (), "now")["tables"][0]["blocks"]]
    assert "likelihood" in blocks


def test_without_likelihoods_there_is_neither_column_nor_table(tmp_path: Path) -> None:
    write_run(tmp_path, lines([None] * 12))
    [made] = comparisons([load(run) for run in find([tmp_path])])
    assert likelihood_table(made) == []
    assert "NLL" not in as_text([made])


@pytest.mark.parametrize(
    ("nats", "shown"), [(None, ""), (0.0, "0"), (1.234, "+1.23"), (-0.0123, "-0.012"), (0.00004, "+4e-05")]
)
def test_nothing_but_0_reads_as_0(nats: float | None, shown: str) -> None:
    assert signed(nats) == shown
