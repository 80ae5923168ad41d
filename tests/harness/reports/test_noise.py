"""A/A runs of Full give a noise floor; copies of one run give none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.reports import noise
from harness.reports.compare import Comparison, comparisons
from harness.results.store import find, load
from tests.fake_records import records, write_run

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


def test_one_full_gives_no_floor_and_neither_does_its_copy(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", records([1.0] * 10))
    write_run(tmp_path / "a", records([0.0] * 10, **SPARSE), "quest")
    assert noise.pairs(table(tmp_path)) == []
    assert noise.floor([]) is None
    assert "unknown" in noise.sentence([])
    shutil.copytree(folder, tmp_path / "b" / folder.name)
    assert noise.pairs(table(tmp_path)) == []


def test_a_run_made_twice_is_an_a_a_pair_only_where_an_answer_changed(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", records([1.0] * 10))
    again = write_run(tmp_path / "b", records([1.0] * 10, token_s=[2.0, 2.5, 2.6, 2.7]))
    assert first.name == again.name
    assert noise.pairs(table(tmp_path)) == []
    write_run(tmp_path / "c", records([1.0] * 9 + [0.0]))
    assert {pair.changed for pair in noise.pairs(table(tmp_path))} == {1}


def test_what_is_within_the_noise(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0] * 60))
    write_run(tmp_path, records([1.0] * 50 + [0.0] * 10, **SPARSE), "quest", budget=0.1)
    write_run(tmp_path, records([1.0] * 58 + [0.0] * 2, **SPARSE), "quest", budget=0.2)
    rows = {entry.title: entry for entry in table(tmp_path).entries}
    assert not noise.within_noise(rows["full"], None)
    assert not noise.within_noise(rows["quest 10%"], None)
    assert noise.within_noise(rows["quest 20%"], None)  # p = 0.5
    assert noise.within_noise(rows["quest 10%"], 0.2)  # Full differs from itself by more
