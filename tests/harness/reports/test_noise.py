"""A/A runs of Full give a noise floor; copies of one run give none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.reports import noise
from harness.reports.columns import notes
from harness.reports.compare import Comparison, comparisons
from harness.reports.document import as_latex, remarks
from harness.results.run_folder import find, load
from tests.fake_records import record, records, write_run

SPARSE = {"attended_prompt": 10.0, "attended_total": 12.0}


def table(folder: Path) -> Comparison:
    [found] = comparisons([load(run) for run in find([folder])])
    return found


def test_the_largest_difference_of_full_from_itself_is_the_floor(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0] * 10))
    write_run(tmp_path, records([1.0] * 9 + [0.0]), dtype="bfloat16")
    write_run(tmp_path, records([1.0] * 7 + [0.0] * 3), batch=4)
    found = noise.pairs(table(tmp_path))
    assert sorted(round(abs(pair.diff), 3) for pair in found) == [0.1, 0.2, 0.3]
    assert noise.floor(found) == pytest.approx(0.3)
    said = noise.sentence(found)
    assert said.startswith("noise floor: 30.0 points")
    assert "3 A/A pairs" in said
    assert "n = 10, 3 answers changed" in said
    low, high = max(found, key=lambda pair: abs(pair.diff)).ci95
    assert low < high


def test_the_floor_of_a_likelihood_is_the_largest_typical_difference(tmp_path: Path) -> None:
    for batch, added in ((1, 0.0), (2, 0.001), (4, 0.004)):
        write_run(tmp_path, [record(f"{i}", answer_nll=0.1 * i + added) for i in range(12)], batch=batch)
    said = noise.sentence(noise.pairs(table(tmp_path)))
    names = "full batch=1 against full batch=4"
    assert said.endswith(f"; of its likelihood -0.0040 nats per token: {names}, 95 % CI [-0.0040, -0.0040], n = 12")


def test_one_full_gives_no_floor_and_neither_does_its_copy(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", records([1.0] * 10))
    write_run(tmp_path / "a", records([0.0] * 10, **SPARSE), "quest")
    assert noise.pairs(table(tmp_path)) == []
    assert noise.floor([]) is None
    assert "unknown" in noise.sentence([])
    shutil.copytree(folder, tmp_path / "b" / folder.name)
    assert noise.pairs(table(tmp_path)) == []


def test_a_run_made_twice_is_one_row_and_measures_nothing(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", records([1.0] * 10))
    again = write_run(tmp_path / "b", records([1.0] * 10, token_s=[2.0, 2.5, 2.6, 2.7]))
    assert first.name == again.name
    found = table(tmp_path)
    assert noise.pairs(found) == []
    assert [entry.title for entry in found.entries] == ["full"]
    said = (
        f"found 2 times with the same answers, shown once, as in the first: full ({tmp_path / 'a'}, {tmp_path / 'b'})"
    )
    assert said in list(notes(found))
    assert found.alarms == []


def test_a_run_that_did_not_repeat_itself_is_an_alarm_and_no_noise(tmp_path: Path) -> None:
    write_run(tmp_path / "a", records([1.0] * 10))
    write_run(tmp_path / "b", records([1.0] * 9 + [0.0]))
    found = table(tmp_path)
    assert noise.pairs(found) == []
    assert len(found.entries) == 2
    [alarm] = [alarm for alarm in found.alarms if alarm.kind == "made_twice"]
    assert alarm.red
    assert "1 of 10 answers or scores differ" in alarm.text


@pytest.mark.parametrize(
    "facts",
    [
        {"backends": {"attention": ["reference"]}},
        {"provenance": {"versions": {"torch": "3.0"}, "machine": {"cpu": "A", "threads": 2}}},
        {"provenance": {"versions": {"torch": "2.0"}, "machine": {"cpu": "B", "threads": 2}}},
        {"provenance": {"versions": {"torch": "2.0"}, "machine": {"cpu": "A", "threads": 4}}},
    ],
)
def test_the_same_full_elsewhere_is_an_a_a_pair(tmp_path: Path, facts: dict[str, Any]) -> None:
    here = {"versions": {"torch": "2.0"}, "machine": {"cpu": "A", "threads": 2}}
    write_run(tmp_path / "a", records([1.0] * 10), facts={"backends": {"attention": ["cpu"]}, "provenance": here})
    write_run(tmp_path / "b", records([1.0] * 9 + [0.0]), facts=facts)
    [pair] = noise.pairs(table(tmp_path))
    assert (pair.changed, pair.n) == (1, 10)
    assert not [alarm for alarm in table(tmp_path).alarms if alarm.kind == "made_twice"]


def test_fulls_of_other_settings_measure_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0] * 10))
    write_run(tmp_path, records([1.0] * 10), trace="on")
    assert noise.pairs(table(tmp_path)) == []
    assert "no two runs of Full differ" in noise.sentence([])


def test_a_copy_that_was_cut_short_is_the_same_run(tmp_path: Path) -> None:
    write_run(tmp_path / "a", records([1.0] * 4), "full", "interrupted")
    write_run(tmp_path / "b", records([1.0] * 10))
    [entry] = table(tmp_path).entries
    assert len(entry.run.records) == 10


def test_what_is_within_the_noise(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0] * 60))
    write_run(tmp_path, records([1.0] * 50 + [0.0] * 10, **SPARSE), "quest", budget=0.1)
    write_run(tmp_path, records([1.0] * 58 + [0.0] * 2, **SPARSE), "quest", budget=0.2)
    made = table(tmp_path)
    beside = {entry.title: made.beside(entry) for entry in made.entries}
    assert not noise.within_noise(beside["full"], None)
    assert not noise.within_noise(beside["quest 10%"], None)
    assert noise.within_noise(beside["quest 20%"], None)  # p = 0.5
    assert noise.within_noise(beside["quest 10%"], 0.2)  # Full differs from itself by more


def test_a_table_of_full_alone_says_its_floor_and_one_of_a_single_full_says_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0] * 10))
    assert not any("noise floor" in said for said in remarks(table(tmp_path)))
    write_run(tmp_path, records([1.0] * 9 + [0.0]), batch=4)
    assert any(said.startswith("noise floor: 10.0 points") for said in remarks(table(tmp_path)))
    assert "Noise floor: 10.0 points" in as_latex([table(tmp_path)])
