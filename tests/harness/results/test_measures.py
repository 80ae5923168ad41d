"""A fact has one entry in one table, and is then in records, summary, tables, sentences, page and CSV."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from harness.engine.batch.running_sequence import Generation
from harness.reports.columns import measurements
from harness.reports.compare import comparisons
from harness.reports.document import as_rows, as_text
from harness.results.fact import Fact, entry, total
from harness.results.facts import FACTS, joined
from harness.results.files import write_csv
from harness.results.measures import MEASURES, measure
from harness.results.records import Record
from harness.results.run_folder import load
from methods.tiers.tier import TIERS
from tests.fake_records import record, talk, turn, write_run

ROOT = Path(__file__).parents[3]


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a number that nobody has measured before, which has its line."""
    monkeypatch.setitem(
        joined(tuple(TIERS)), "probes_per_step", measure("tokens", head="probes", shown="probes of an index")
    )
    return "probes_per_step"


def test_a_new_number_needs_its_line_alone(probes: str, tmp_path: Path) -> None:
    lines = [record("a", **{probes: 3.0}), record("b", **{probes: 5.0}), record("c")]
    run = write_run(tmp_path, lines, "full")
    written = [json.loads(line) for line in (run / "examples.jsonl").read_text().splitlines()]
    assert [line[probes] for line in written] == [3.0, 5.0, None]
    del written[0][probes]  # a line older than the number
    assert Record.from_plain(written[0], "line 1")[probes] is None
    [table] = comparisons([load(run)])
    assert table.entries[0].summary["memory"][probes] == 4.0
    [column] = [column for column in measurements(table) if column.head == "probes"]
    assert (column.unit, column.values) == ("tokens", [4.0])
    write_csv(tmp_path / "table.csv", as_rows([table]))
    with open(tmp_path / "table.csv", newline="") as file:
        assert next(csv.DictReader(file))[f"memory.{probes}"] == "4.0"


def test_a_new_fact_needs_its_entry_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fact = Fact(
        unit="tokens",
        over_turns=total,
        section="answers",
        over_examples=entry(total),
        by_turn=entry(total),
        stamp=("Z", "tokens were healed"),
        alarm="healed tokens",
        warnings={"were healed": lambda one: bool(one["healed"])},
        caution=lambda records, config: iter([f"{records[0]['healed']} healed"]),
        note=lambda title, records, config: iter([f"{title} heals"]),
    )
    monkeypatch.setitem(joined(tuple(TIERS)), "healed", fact)
    [table] = comparisons([load(write_run(tmp_path, [talk("a", turn(healed=2), turn(healed=3))], "full"))])
    [row] = as_rows([table])
    assert (row["healed"], row["turns.2.healed"], row["stamps"]) == (5, 3, "Z!")
    text = " ".join(as_text([table]).split())
    for sentence in (
        "Z: tokens were healed",
        "full: healed tokens",
        "1 of 1 examples were healed",
        "full: 5 healed",
        "full heals",
    ):
        assert sentence in text


def test_a_conversation_has_the_mean_over_its_turns(probes: str) -> None:
    conversation = talk("a", turn(**{probes: 3.0, "hit_rate": 0.5}), turn(**{probes: 7.0, "hit_rate": None}))
    assert (conversation[probes], conversation["hit_rate"]) == (5.0, 0.5)


def test_what_the_engine_measures_is_in_the_table_and_in_docs() -> None:
    """A key that has no line would never be written."""
    assert Generation(tokens=[], stops=[]).measured == {}
    assert Generation(tokens=[], stops=[]).facts.keys() <= FACTS.keys()
    places = ("engine/batch/running_sequence.py", "engine/batch/running.py", "jobs/questions.py")
    source = "".join((ROOT / "harness" / place).read_text() for place in places)
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for key, fact in MEASURES.items():
        assert f'"{key}"' in source
        assert f"| `{key}` | {fact.unit} |" in page
