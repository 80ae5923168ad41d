"""A fact has one entry in one table, and is then in records, summary, tables, sentences, page and CSV."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from harness.engine.batch.running_sequence import Generation
from harness.reports.columns import measurements
from harness.reports.compare import comparisons
from harness.reports.document import as_rows, as_text
from harness.results.fact import Fact, entry, total
from harness.results.facts import FACTS, joined
from harness.results.files import write_csv
from harness.results.measures import MEASURES, measure
from harness.results.records import Record, RecordError
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


# Lines of examples.jsonl: what they hold, those that an older harness wrote, and conversations as one reply.


def test_a_record_survives_its_file() -> None:
    original = record("ä\u2028", details={"em": 0.5}, context_tokens=7, prompt_ids=[1, 2], data={"depth": 0.25})
    assert Record.from_plain(json.loads(original.to_json()), "here") == original
    assert "\n" not in original.to_json()


def test_times_of_a_record() -> None:
    full = record(token_s=[1.0, 3.0, 3.5, 4.5])
    assert (full.ttft_s, full.tt2t_s, full.tpot_s, full.intervals_s) == (1.0, 3.0, 0.75, [0.5, 1.0])
    short = record(token_s=[1.0])
    assert (short.tt2t_s, short.tpot_s, short.intervals_s) == (None, None, [])
    assert record(token_s=[1.0, 2.0]).tpot_s is None


@pytest.mark.parametrize("change", [{"score": 1.5}, {"score": float("nan")}, {"tokens": [1], "token_s": [1.0, 2.0]}])
def test_a_record_refuses_what_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        record(**change)


def test_older_lines_have_more_and_fewer_keys() -> None:
    original = talk("a", turn(kv_disk_bytes=7), turn(union_prompt=7.0))
    plain = json.loads(original.to_json()) | {"sha256": "of the line", "grpah_s": 0.25}
    plain["turns"] = [one | {"grpah_s": 0.25} for one in plain["turns"]]
    assert Record.from_plain(plain, "line 1") == original
    for part in (plain, *plain["turns"]):
        part.pop("kv_disk_bytes", None)
        del part["union_prompt"]
    older = Record.from_plain(plain, "line 1")
    assert [older[f"kv_{tier}_bytes"] for tier in ("device", "host", "disk")] == [1000, 0, 0]
    assert older.replies[0]["kv_disk_bytes"] == 0
    assert older.share("union_prompt") is None
    del plain["kv_device_bytes"]
    with pytest.raises(RecordError, match=r"line 3.*kv_device_bytes"):
        Record.from_plain(plain, "line 3")


def test_a_conversation_adds_up_what_turns_took_and_ends_as_the_last_one_does() -> None:
    first = turn(sealed=False, seal_s=None, kv_device_bytes=100, token_s=[1.0, 1.5], stop="length", score=0.5)
    last = turn(sealed=True, seal_s=0.2, kv_device_bytes=170, token_s=[0.5, 0.75], attended_prompt=None, fallback="why")
    one = talk("a", first, last)
    assert one.token_s == [1.0, 1.5, 2.0, 2.25]
    assert (one["seal_s"], one["question_s"], one.prompt_tokens) == (0.2, None, 20)
    assert (one["kv_device_bytes"], one.stop, one["sealed"], one["fallback"]) == (170, "eos", True, "why")
    assert (one.score, one["attended_prompt"]) == (0.75, 100.0)
