"""Tables of conversations: what each turn found, and what is said where none found anything."""

from __future__ import annotations

from pathlib import Path

from harness.reports.compare import Comparison, comparisons
from harness.reports.page.data import page_data
from harness.reports.turns import notes, turn_reuse, turn_scores
from harness.results.run_folder import load
from tests.fake_records import talk, turn, write_run


def table(root: Path, *tiers: str | None) -> Comparison:
    """A conversation of two turns for each of `tiers`, in which the second found its history."""
    lines = [
        talk(f"talk {place}", turn(score=1.0), turn(score=0.5, hit_tier=tier, history_tokens=14))
        for place, tier in enumerate(tiers)
    ]
    [found] = comparisons([load(write_run(root, lines, history="store"))])
    return found


def test_tiers_are_counted_where_they_differ(tmp_path: Path) -> None:
    mixed = ("host", None, "host", "disk", None, None)
    for name, tiers, told in (("alike", ("disk", "disk"), "disk"), ("mixed", mixed, "disk 1, host 2, nowhere 3")):
        found = {column.head: column.cells for column in turn_reuse(table(tmp_path / name, *tiers))}
        assert found["found in"] == ["", told]


def test_turns_that_lost_their_histories_are_named_with_the_reasons(tmp_path: Path) -> None:
    later = [turn(lost_turns=1, lost_to="the disk is full"), turn(lost_turns=0, hit_tier="disk")]
    lines = [talk(f"talk {place}", turn(), *later) for place in range(3)]
    lines.append(talk("old", turn(), turn(lost_turns=1, lost_to="its time to live was over")))
    [found] = comparisons([load(write_run(tmp_path, lines, "snapkv", history="store"))])
    [alarm] = [alarm for alarm in found.alarms if alarm.kind == "lost_turns"]
    assert (alarm.count, alarm.of, alarm.red) == (1, 1, False)
    shown = {column.head: column.cells for column in turn_reuse(found)}
    assert shown["lost"] == ["", "4", ""]
    assert found.entries[0].summary["lost_turns"] == 4
    [whole] = comparisons([load(write_run(tmp_path / "whole", [talk("a", turn(), later[1])], history="store"))])
    assert not [alarm for alarm in whole.alarms if alarm.kind == "lost_turns"]
    assert "lost" not in {column.head: column.cells for column in turn_reuse(whole) if any(column.cells)}


def test_a_store_that_never_helped_is_named(tmp_path: Path) -> None:
    for name, tier, said in (("never", None, 1), ("always", "host", 0)):
        told = list(notes(table(tmp_path / name, tier).entries))
        assert sum("no turn" in note for note in told) == said


def test_scores_are_by_turn(tmp_path: Path) -> None:
    *_, scores = turn_scores(table(tmp_path, "host", "host"))
    assert scores.values == [1.0, 0.5]


def test_on_the_page_each_column_belongs_to_its_run(tmp_path: Path) -> None:
    """Tables by turn have one, two or three columns before those of the runs, not all of them shown."""
    runs = []
    for name in ("recompute", "store"):
        turns = [turn(score=0.5, data={"turns_ago": ago}) for ago in (0, 1)]
        runs.append(load(write_run(tmp_path, [talk("a", *turns), talk("b", *turns)], history=name)))
    [data] = page_data(comparisons(runs), [], made="")["tables"]
    found = {block["name"]: [column["run"] for column in block["columns"]] for block in data["blocks"]}
    assert {"turns", "turns_ago", "turn_times"} <= found.keys()
    for name in ("turns", "turns_ago", "turn_times"):
        assert [run for run in found[name] if run is not None] == [0, 1], name
