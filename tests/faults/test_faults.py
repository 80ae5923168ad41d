"""The script draws what it says, and its judge finds what it is there to find."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from harness.history import index
from harness.results.run_folder import load
from harness.results.summary_file import summary_of, write_summary
from tests.fake_records import records, write_run
from tests.faults import __main__ as script
from tests.faults import judge
from tests.faults.draw import faults
from tests.faults.harm import KINDS, TO_FILES
from tests.faults.targets import TARGETS, Said

SCORES = (1.0, 0.0, 0.5)
FINE = Said(0, "a table")


def test_every_pair_is_drawn_twice_and_again_with_the_same_seed() -> None:
    drawn = list(islice(faults(5), 100))
    pairs = Counter((fault.kind, fault.target) for fault in drawn)
    assert len(pairs) == len(KINDS) * len(TARGETS)
    assert min(pairs.values()) >= 2
    assert drawn == list(islice(faults(5), 100)) != list(islice(faults(6), 100))
    assert all(bool(fault.moment) == (fault.kind in TO_FILES) for fault in drawn)


@pytest.mark.slow
def test_a_few_faults(tmp_path: Path) -> None:
    few = list(islice(faults(3), 6))
    outcomes = script.tried(few, tmp_path)
    assert [made.wrong for made in outcomes.values()] == [[]] * len(few)


def working_folder(path: Path, scores: Sequence[float] = SCORES, **changes: Any) -> Path:
    """Of a command that ended well, with a report and a store; `changes` to its records."""
    lines = records(scores, **{"tokens": [1, 2, 3, 4]} | changes)
    folder = write_run(path / "runs", lines, "snapkv", facts={"num_expected": len(SCORES)})
    write_summary(load(folder), None, summary_of(load(folder), None))
    for name in ("out/table.csv", "temporary/.keep", "store/x/blocks/ab/abc.safetensors"):
        (path / name).parent.mkdir(parents=True)
        (path / name).write_text("as it was")
    with closing(sqlite3.connect(path / "store" / "x" / index.NAME)) as connection, connection:
        connection.execute("create table blocks (name text)")
        connection.execute("insert into blocks values ('abc')")
    return path


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return working_folder(tmp_path / "sound")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return working_folder(tmp_path / "work")


def wrong(sound: Path, work: Path, again: Said = FINE) -> list[str]:
    return [
        *judge.of_output(FINE, again),
        *judge.of_reading(sound, work),
        *judge.of_ending(sound, work, again),
        *judge.of_files(sound, work, harmed=False),
    ]


def test_nothing_is_wrong_with_what_is_as_it_was(sound: Path, work: Path) -> None:
    assert wrong(sound, work) == []


@pytest.mark.parametrize("changes", [{"tokens": [1, 2, 3, 5]}, {"output": "another"}, {"scores": (1.0, 0.0, 0.6)}])
def test_another_answer_under_the_same_identity_is_found(sound: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Its checksums all hold."""
    work = working_folder(tmp_path / "work", **changes)
    assert any("e2 has another answer or score, and no stamp" in line for line in wrong(sound, work))


def test_an_answer_may_be_another_where_its_row_is_stamped(sound: Path, tmp_path: Path) -> None:
    work = working_folder(tmp_path / "work", tokens=[1, 2, 3, 5], lost_turns=1)
    [line] = wrong(sound, work)
    assert line.endswith("has lost turns, and its row no stamp")
    assert wrong(sound, work, Said(0, f"X: {judge.STAMPED}")) == []


def test_a_run_of_another_identity_is_found(sound: Path, work: Path) -> None:
    write_run(work / "runs", records(SCORES), "snapkv", seed=1)
    assert any("is a run of another identity" in line for line in wrong(sound, work))


def test_a_run_that_lacks_an_example_is_found(sound: Path, tmp_path: Path) -> None:
    work = working_folder(tmp_path / "work", scores=SCORES[:2])
    assert any("is complete with 2 examples" in line for line in wrong(sound, work))


@pytest.mark.parametrize(
    "name",
    [
        "temporary/kv-history-0123456789abcdef/rows",
        "runs/snapkv/.run.json.0123456789abcdef",
        "runs/examples.jsonl.damaged",
        "cache/tasks/ruler/.vt.jsonl.tmp",
        "store/x/index.sqlite-shm",
        "store/x/blocks/ab/def.partial",
        "store/x/blocks/ab/def.safetensors",
    ],
)
def test_what_is_left_is_found(sound: Path, work: Path, name: str) -> None:
    (work / name).parent.mkdir(parents=True, exist_ok=True)
    (work / name).touch()
    assert any("left" in line for line in wrong(sound, work))


def test_what_is_missing_or_changed_is_found(sound: Path, work: Path) -> None:
    (work / "out/table.csv").write_text("as it was not")
    assert any("out/table.csv is not what it was" in line for line in wrong(sound, work))
    (work / "out/table.csv").unlink()
    assert any("out/table.csv is missing" in line for line in wrong(sound, work))
    (summary,) = work.glob("runs/*/summary.json")
    summary.write_text(summary.read_text().replace("0.5", "0.9"))
    assert any("summary.json was changed" in line for line in wrong(sound, work))


@pytest.mark.parametrize(
    "again",
    [
        Said(0, "note\nTraceback (most recent call last):\n  File"),
        Said(0, "error: KeyError: 5. The traceback is in /tmp/kv-harness-1.txt."),
        Said(0, "Exception ignored in: <function"),
        Said(2, "error: cannot write"),
        Said(None, ""),
    ],
)
def test_a_traceback_and_a_bad_end_are_found(sound: Path, work: Path, again: Said) -> None:
    assert wrong(sound, work, again)


def test_what_a_stopped_command_ends_with() -> None:
    assert [kind for kind in ("kill", "signal", "flip") if not list(judge.of_end(kind, 1))] == ["flip"]
    assert list(judge.of_end("flip", None)) == ["the command did not end"]
    assert not list(judge.of_end("signal", 143))
    assert not list(judge.of_end("kill", -9))
