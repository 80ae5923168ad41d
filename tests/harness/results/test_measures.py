"""A number that is measured has one line in one table, and is then in records, summary, table, page and CSV."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from harness.engine.batch.running_sequence import Generation
from harness.reports.columns import measurements
from harness.reports.compare import comparisons
from harness.reports.document import as_rows
from harness.results.files import write_csv
from harness.results.measures import MEASURES, Measure
from harness.results.records import Record
from harness.results.run_folder import load
from tests.fake_records import record, talk, turn, write_run

ROOT = Path(__file__).parents[3]


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a number that nobody has measured before, which has its line."""
    line = Measure(unit="tokens", head="probes", shown="probes of an index")
    monkeypatch.setitem(MEASURES, "probes_per_step", line)
    return "probes_per_step"


def test_a_new_number_needs_its_line_alone(probes: str, tmp_path: Path) -> None:
    lines = [record("a", **{probes: 3.0}), record("b", **{probes: 5.0}), record("c")]
    run = write_run(tmp_path, lines, "full")
    written = [json.loads(line) for line in (run / "examples.jsonl").read_text().splitlines()]
    assert [line[probes] for line in written] == [3.0, 5.0, None]
    del written[0][probes]  # a line older than the number
    assert Record.from_plain(written[0], "line 1").measured[probes] is None
    [table] = comparisons([load(run)])
    assert table.entries[0].summary["memory"][probes] == 4.0
    [column] = [column for column in measurements(table) if column.head == "probes"]
    assert (column.unit, column.values) == ("tokens", [4.0])
    write_csv(tmp_path / "table.csv", as_rows([table]))
    with open(tmp_path / "table.csv", newline="") as file:
        assert next(csv.DictReader(file))[f"memory.{probes}"] == "4.0"


def test_a_conversation_has_the_mean_over_its_turns(probes: str) -> None:
    conversation = talk("a", turn(**{probes: 3.0, "hit_rate": 0.5}), turn(**{probes: 7.0, "hit_rate": None}))
    assert (conversation.measured[probes], conversation.measured["hit_rate"]) == (5.0, 0.5)


def test_what_the_engine_measures_is_in_the_table_and_in_docs() -> None:
    """A key that has no line would never be written."""
    assert Generation(tokens=[], stops=[]).measured == {}
    places = ("engine/batch/running_sequence.py", "engine/batch/running.py", "jobs/questions.py")
    source = "".join((ROOT / "harness" / place).read_text() for place in places)
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for key, measure in MEASURES.items():
        assert f'"{key}"' in source
        assert f"| `{key}` | {measure.unit} |" in page
