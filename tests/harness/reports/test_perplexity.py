"""Texts that are fed in place of answers: tables show perplexity and nats, and nowhere a score from 0 to 100."""

from __future__ import annotations

from math import exp
from pathlib import Path

import numpy as np
import pytest

from harness.reports.columns import notes, score_table
from harness.reports.compare import Comparison, comparisons
from harness.reports.document import as_text
from harness.reports.groups import average_table, group_table
from harness.reports.page.data import page_data
from harness.reports.pictures.draw import draw
from harness.reports.spreadsheet import table_rows
from harness.results.alarms import Alarm
from harness.results.records import Record
from harness.results.run_folder import find, load
from tests.fake_records import record, write_run

FULL = 3 + 0.3 * np.sin(np.arange(30))
FACTS = {"task_info": {"metric": "perplexity", "version": "2", "chance": None}}


def windows(nlls: np.ndarray, **changes: object) -> list[Record]:
    return [
        record(
            f"w{i}",
            group="ab"[i % 2],
            score=exp(-nll),
            details={"nll": float(nll)},
            output=repr(float(nll)),
            stop="forced",
            **changes,
        )
        for i, nll in enumerate(nlls)
    ]


def table_of(root: Path, count: int = 30, loss: float = 0.02, metric: str = "perplexity") -> Comparison:
    facts = {"task_info": FACTS["task_info"] | {"metric": metric}}
    write_run(root, windows(FULL[:count]), facts=facts)
    worse = FULL + loss + 0.01 * np.cos(np.arange(30))
    write_run(root, windows(worse[:count], attended_prompt=10.0), "quest", facts=facts)
    [table] = comparisons([load(run) for run in find([root])])
    return table


@pytest.mark.parametrize("metric", ["perplexity", "1/perplexity"])
def test_the_main_table_shows_perplexity_and_nats(tmp_path: Path, metric: str) -> None:
    table = table_of(tmp_path, metric=metric)
    columns = {column.head: column for column in score_table(table)}
    assert "score" not in columns
    assert "vs full" not in columns
    assert columns["perplexity"].values == pytest.approx([exp(FULL.mean()), exp(FULL.mean() + 0.02)], rel=1e-3)
    assert columns["NLL vs full"].cells[1].startswith("+0.02")
    assert columns["NLL vs full"].cells[1].endswith("]*")
    text = as_text([table])
    assert "0-100" not in text
    assert "1/perplexity" not in text
    assert "points" not in text
    assert average_table(table) == []


def test_groups_have_perplexities_too(tmp_path: Path) -> None:
    [_, _, full, quest] = group_table(table_of(tmp_path))
    assert full.values == pytest.approx([exp(FULL[::2].mean()), exp(FULL[1::2].mean())])
    assert all(a < b for a, b in zip(full.values, quest.values, strict=True) if a and b)


def test_few_windows_have_no_interval(tmp_path: Path) -> None:
    table = table_of(tmp_path, count=23)
    [_, row] = table_rows([table])
    assert (row["likelihood.full.p"], row["likelihood.full.ci95.low"]) == (None, None)
    assert row["likelihood.full.diff"] == pytest.approx(0.02, abs=0.01)
    assert table.costed == []
    assert any(note.startswith("fewer than 24 windows") and "quest" in note for note in notes(table))
    assert not [note for note in notes(table_of(tmp_path / "more", count=24)) if "fewer than" in note]


def test_pictures_and_page_show_nats_and_more_is_better(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    beside = table.beside(table.entries[1])
    assert beside is not None
    assert beside["ci95"][0] < beside["diff"] < beside["ci95"][1] < 0
    assert [path.name for path in draw([table], tmp_path / "plots") if path.suffix == ".png"] == [
        "1-niah-tiny-protocol=prompt-differences.png"
    ]
    shown = page_data([table], (), "now")["tables"][0]
    assert not shown["points"]
    assert shown["panels"] == []
    assert shown["rows"][1]["beside"] == {key: beside[key] for key in ("diff", "ci95", "p")}
    assert all(row["score"] is None for row in shown["rows"])
    assert {answer[1] for own in shown["outputs"]["answers"] for answer in own.values()} == {None}


def test_a_method_better_than_full_raises_the_alarm(tmp_path: Path) -> None:
    def above(alarms: list[Alarm]) -> bool:
        return any(alarm.kind == "above_full" for alarm in alarms)

    assert above(table_of(tmp_path / "better", loss=-0.1).alarms)
    assert not above(table_of(tmp_path / "worse", loss=0.1).alarms)
