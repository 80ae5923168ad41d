"""A number that is measured has one line in one table, and is then in records, summary, table, page, CSV and docs."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from harness.engine.batch.generation import Generation
from harness.reports.columns import measurements
from harness.reports.compare import comparisons
from harness.reports.document import as_rows
from harness.results.files import write_csv
from harness.results.measures import MEASURES, Measure, markdown
from harness.results.records import Record
from harness.results.run_folder import load
from tests.fake_records import record, talk, turn, write_run

ROOT = Path(__file__).parents[3]
PROBES = Measure(
    meaning="Probes of an index per step.", unit="tokens", over_turns=max, head="probes", shown="probes of an index"
)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> str:
    """A number that nobody has measured before, and its line."""
    monkeypatch.setitem(MEASURES, "probes_per_step", PROBES)
    return "probes_per_step"


def test_a_new_number_needs_its_line_alone(probes: str, tmp_path: Path) -> None:
    lines = [record("a", **{probes: 3.0}), record("b", **{probes: 5.0}), record("c")]
    run = write_run(tmp_path, lines, "full")
    written = [json.loads(line) for line in (run / "examples.jsonl").read_text().splitlines()]
    assert [line[probes] for line in written] == [3.0, 5.0, None]
    [table] = comparisons([load(run)])
    assert table.entries[0].summary["memory"][probes] == 4.0
    [column] = [column for column in measurements(table) if column.head == "probes"]
    assert (column.unit, column.values) == ("tokens", [4.0])
    write_csv(tmp_path / "table.csv", as_rows([table]))
    with open(tmp_path / "table.csv", newline="") as file:
        assert next(csv.DictReader(file))[f"memory.{probes}"] == "4.0"
    assert f"| `{probes}` | tokens | Probes of an index per step. |" in markdown()


def test_turns_become_one_number_as_the_line_says(probes: str) -> None:
    conversation = talk("a", turn(**{probes: 3.0, "hit_rate": 0.5}), turn(**{probes: 7.0, "hit_rate": None}))
    assert (conversation.measured[probes], conversation.measured["hit_rate"]) == (7.0, 0.5)


def test_lines_older_than_a_number_do_not_have_it(probes: str) -> None:
    plain = json.loads(record("a").to_json())
    del plain[probes]
    assert Record.from_plain(plain, "line 1").measured[probes] is None


def test_what_the_engine_measures_is_in_the_table() -> None:
    """A key that has no line would never be written."""
    assert Generation(tokens=[], stops=[]).measured == {}
    places = ("engine/batch/running_sequence.py", "engine/batch/running.py", "jobs/questions.py")
    source = "".join((ROOT / "harness" / place).read_text() for place in places)
    assert all(f'"{key}"' in source for key in MEASURES)


def test_the_table_in_docs_is_what_the_code_says() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert markdown() in page, "write it: python -c 'from harness.results.measures import markdown; print(markdown())'"
