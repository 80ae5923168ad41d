"""Bands of Full: derived from runs, found again by what a score depends on, and left by a Full that is not itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.commands import bands as command
from harness.results import bands
from harness.results.records import Record
from harness.results.run_folder import StoredRun, load
from tests.fake_records import records, write_run

SPARSE = {"attended_prompt": 10.0, "attended_total": 12.0}


def made(root: Path, lines: list[Record], method: str = "full", **changes: Any) -> StoredRun:
    return load(write_run(root, lines, method, **changes))


def two_groups(a: list[float], b: list[float], prefix: str = "e") -> list[Record]:
    return records(a, f"{prefix}a", group="a") + records(b, f"{prefix}b", group="b")


def test_what_was_published_comes_back(tmp_path: Path) -> None:
    run = made(tmp_path / "old", two_groups([1.0] * 9 + [0.0], [0.25, 0.5] * 5))
    file = tmp_path / "bands.json"
    bands.write(bands.derived([run]), file)
    [band] = bands.stored(file)
    assert band.about == bands.about(run)
    assert band.scores == {"a": [0.0] + [1.0] * 9, "b": [0.25] * 5 + [0.5] * 5}
    plain = band.plain()
    assert (plain["n"], plain["mean"]) == (20, pytest.approx((0.9 + 0.375) / 2, abs=1e-4))
    assert plain["groups"]["a"]["range"] == [pytest.approx(0.606, abs=1e-3), pytest.approx(0.995, abs=1e-3)]
    assert plain["sources"][0]["folder"] == run.folder.name
    assert bands.outside(run, [band]) == []


def test_only_finished_runs_of_full_make_bands(tmp_path: Path) -> None:
    quest = made(tmp_path, records([1.0], **SPARSE), "quest")
    half = load(write_run(tmp_path, records([1.0]), "full", "interrupted"))
    assert bands.derived([quest, half]) == []


def test_runs_of_the_same_conditions_add_up_and_a_prompt_counts_once(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / str(seed), records([1.0] * 4, prefix), seed=seed, task=task)
        for seed, prefix, task in ((0, "a", None), (1, "b", None), (2, "a", {"lengths": [512, 1024], "rounds": 2}))
        for task in [{"_target_": "evals.niah.Niah"} | (task or {"lengths": [1024]})]
    ]
    [band] = bands.derived(runs)
    assert len(band.scores["g"]) == 8
    assert len(band.sources) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bf16"},
        {"chat": "none"},
        {"model": {"name": "other", "revision": None}},
        {"generation": {"temperature": 0.0, "max_new_tokens": 5}},
        {"task": {"_target_": "evals.niah.Niah", "needle": "passkey"}},
        {"facts": {"task_info": {"version": "2"}}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_condition_has_no_band(tmp_path: Path, change: dict[str, Any]) -> None:
    known = bands.derived([made(tmp_path / "old", records([1.0] * 20))])
    assert bands.outside(made(tmp_path / "same", records([0.0] * 20), seed=5), known)
    assert bands.outside(made(tmp_path / "new", records([0.0] * 20), **change), known) == []


def test_a_key_at_its_default_is_no_condition(tmp_path: Path) -> None:
    old = made(tmp_path / "old", records([1.0]))
    task = {"_target_": "evals.niah.Niah", "lengths": [64], "needle": "magic_city", "system": ""}
    new = made(tmp_path / "new", records([1.0]), task=task, chat="template", generation={"temperature": 0.0})
    assert bands.about(old) == bands.about(new)


def test_a_task_that_is_not_here_has_no_band(tmp_path: Path) -> None:
    run = made(tmp_path, records([0.0] * 20), task={"_target_": "nowhere.Task"})
    assert bands.about(run) is None
    assert bands.outside(run, bands.derived([run])) == []


def test_the_mean_and_each_group_are_held_against_the_band(tmp_path: Path) -> None:
    known = bands.derived([made(tmp_path / "old", two_groups([1.0] * 20, [0.5] * 20))])
    one = made(tmp_path / "one", two_groups([0.0] * 6, [1.0] * 6))
    assert [found.group for found in bands.outside(one, known)] == ["a"]
    both = bands.outside(made(tmp_path / "both", two_groups([0.0] * 9, [0.0] * 9)), known)
    assert [found.group for found in both] == [None, "a", "b"]
    assert (both[0].mean, both[0].expected, both[0].examples) == (0.0, 0.75, 18)
    above = bands.derived([made(tmp_path / "low", records([0.0] * 20), chat="none")])
    assert bands.outside(made(tmp_path / "high", records([1.0] * 20), chat="none"), above)


def test_one_example_is_no_proof_and_unknown_groups_are_left_out(tmp_path: Path) -> None:
    known = bands.derived([made(tmp_path / "old", records([1.0] * 20, group="a"))])
    assert bands.outside(made(tmp_path / "one", records([0.0], group="a")), known) == []
    assert bands.outside(made(tmp_path / "new", records([0.0] * 20, group="b")), known) == []


def test_a_needle_in_other_hay_is_another_group(tmp_path: Path) -> None:
    known = bands.derived([made(tmp_path / "old", records([1.0] * 20, data={"haystack": "pydoc"}))])
    assert list(known[0].scores) == ["g (pydoc)"]
    assert bands.outside(made(tmp_path / "a", records([0.0] * 20, data={"haystack": "essays"})), known) == []
    assert bands.outside(made(tmp_path / "b", records([0.0] * 20, data={"haystack": "pydoc"})), known)


def test_groups_of_a_band_are_replaced_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "bands.json"
    for haystack, scores in (("pydoc", [1.0] * 4), ("essays", [0.5] * 3), ("pydoc", [0.0] * 2)):
        run = made(tmp_path / f"{haystack}{len(scores)}", records(scores, data={"haystack": haystack}))
        bands.write(bands.derived([run]), file)
    (band,) = bands.stored(file)
    assert {group: list(scores) for group, scores in band.scores.items()} == {
        "g (pydoc)": [0.0] * 2,
        "g (essays)": [0.5] * 3,
    }
    assert len(band.sources) == 3


def test_the_stored_bands_are_those_their_scores_give() -> None:
    found = bands.stored()
    assert found
    assert {"bands": [band.plain() for band in found]} == bands.files.read_json(bands.FILE)


def test_the_command_derives_replaces_and_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "bands.json")
    write_run(tmp_path / "runs", records([1.0] * 3))
    write_run(tmp_path / "other", records([1.0] * 3), dtype="bf16", chat="none")
    assert command.main([str(tmp_path / "runs"), str(tmp_path / "other"), "--file", file]) == 0
    write_run(tmp_path / "again", records([0.0] * 5))
    assert command.main([str(tmp_path / "again"), "--file", file]) == 0
    capsys.readouterr()
    assert command.main(["--file", file]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["g", "tiny", "bf16", "chat=none", "100.0", "36.8", "to", "100.0", "3"] in lines
    assert ["g", "tiny", "float32", "0.0", "0.0", "to", "45.1", "5"] in lines
    write_run(tmp_path / "sparse", records([1.0] * 3, **SPARSE), "quest")
    assert command.main([str(tmp_path / "sparse"), "--file", file]) == 2
    assert "no finished run of Full" in capsys.readouterr().err
