"""Names of rows and tables: as typed, never the same for two, and with every setting that tells them apart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.config.catalogue import entries
from harness.reports.compare import comparisons
from harness.reports.conditions import code_versions
from harness.reports.labels import spelled
from harness.results.files import write_lines
from harness.results.identity import meaning_now
from harness.results.run_folder import find, load
from tests.fake_records import records, rewrite, write_run

MANY = {"_target_": "methods.quest.Quest", **{f"a_parameter_with_a_long_name_{n}": 0 for n in range(9)}}


def rows(root: Path) -> list[str]:
    """Label and budget of each row, all of one table."""
    [table] = comparisons([load(folder) for folder in find([root])])
    return [entry.title for entry in table.entries]


def titles(root: Path) -> set[str]:
    return {table.title for table in comparisons([load(folder) for folder in find([root])])}


def quest(root: Path, **changes: Any) -> Path:
    return write_run(root, records([1.0, 0.0]), "quest", **changes)


def test_a_row_has_the_name_that_was_typed(tmp_path: Path) -> None:
    quest(tmp_path, method=MANY, facts={"presets": {"method": "quest_wide", "task": "niah_pqcache"}})
    quest(tmp_path)  # from Python, or older than presets
    assert set(rows(tmp_path)) == {"quest_wide 10%", "quest 10%"}
    assert titles(tmp_path) == {"niah_pqcache, tiny, protocol=prompt"}


def test_rows_of_one_preset_name_every_parameter_in_which_they_differ(tmp_path: Path) -> None:
    presets = {"presets": {"method": "quest_wide"}}
    last = list(MANY)[-1]
    for value in (0, 1):
        quest(tmp_path, method=MANY | {last: value}, facts=presets)
    assert set(rows(tmp_path)) == {f"quest_wide {last}={value} 10%" for value in (0, 1)}


def test_settings_that_are_no_default_are_named_where_rows_differ_in_them(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0, 1.0]))
    quest(tmp_path, fidelity=3, dense_layers=[0, 1])
    write_run(tmp_path, records([0.0, 1.0]), "h2o", dense_layers=[], batch=1)
    assert rows(tmp_path) == ["full", "h2o 10%", "quest dense_layers=[0,1] fidelity=3 10%"]


def test_a_setting_is_named_only_among_methods_that_have_it(tmp_path: Path) -> None:
    """On a GPU prompts come in chunks and rows while the model computes, but for methods that can do neither."""
    usual = {"device": "cuda", "graphs": "on", "prefill_chunk": 8192}
    write_run(tmp_path, records([1.0, 1.0]), **usual, overlap="auto")
    write_run(tmp_path, records([0.0, 1.0]), "infllm", **usual | {"prefill_chunk": None}, overlap="on")
    quest(tmp_path, **usual, overlap="on")
    assert set(rows(tmp_path)) == {"full", "infllm 10%", "quest 10%"}
    quest(tmp_path, **usual | {"prefill_chunk": 512}, overlap="off")
    assert "quest prefill_chunk=512 overlap=off 10%" in rows(tmp_path)


def test_where_files_lay_is_no_part_of_a_label(tmp_path: Path) -> None:
    for place in ("here", "there"):
        store = {"host": 0, "disk": "1GB", "folder": place}
        quest(tmp_path, history="store", store=store, facts={"presets": {"method": place}})
    assert not any("folder" in label for label in rows(tmp_path))


def used_other_kernels(*folders: Path) -> None:
    """So that none is a copy."""
    for number, folder in enumerate(folders):
        rewrite(folder, backends={"attention": [number]})


def test_runs_that_no_setting_tells_apart_bear_the_mark_of_their_folder(tmp_path: Path) -> None:
    folder = quest(tmp_path)
    other = folder.with_name("niah-quest-0123abcd")  # of other sources
    shutil.copytree(folder, other)
    used_other_kernels(folder, other)
    assert set(rows(tmp_path)) == {f"quest #{folder.name[-8:-4]} 10%", "quest #0123 10%"}


def test_the_same_run_twice_bears_its_place(tmp_path: Path) -> None:
    folder = quest(tmp_path / "one" / "runs")
    other = shutil.copytree(folder, tmp_path / "two" / "runs" / folder.name)
    used_other_kernels(folder, other)
    assert set(rows(tmp_path)) == {f"quest #{folder.name[-8:-4]} {place}/runs 10%" for place in ("one", "two")}


def test_null_is_not_shown_and_a_shared_key_bears_its_place(tmp_path: Path) -> None:
    for seed, layers in ((1, None), (2, None), (2, 4)):
        task = {"_target_": "evals.niah.Niah", "lengths": [9], "seed": seed}
        quest(tmp_path, task=task, model={"name": "tiny", "layers": layers})
    assert titles(tmp_path) == {
        "niah, tiny, protocol=prompt task.seed=1",
        "niah, tiny, protocol=prompt task.seed=2",
        "niah, tiny, protocol=prompt task.seed=2 layers=4",
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (0.25, "0.25"),
        ([1, 1, 2], "[2x1,2]"),
        ([[0, 1], []], "[[0,1],[]]"),
        ("word", "word"),
    ],
)
def test_values_are_spelled_as_they_are_typed(value: object, text: str) -> None:
    assert spelled(value) == text


def test_long_values_stay_short_and_different() -> None:
    first, second = (spelled("a long template, " * 9 + end) for end in "ab")
    assert first != second
    assert len(first) == len(second) == 7
    assert first[0] == "#"
    names = [f"niah_single_{place}" for place in range(12)]
    assert spelled(names).startswith("[niah_single_0,+11]#")
    assert spelled(names) != spelled(names[::-1])


def test_a_parameter_that_is_not_the_preset_s_is_named_even_where_no_other_row_has_it(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0, 1.0]))
    values = next(entry for entry in entries("method") if entry.name == "snapkv_kernel15").values()
    for window in (values["window"], 8):
        facts = {"presets": {"method": "snapkv_kernel15"}}
        method = values | {"window": window}
        folder = write_run(tmp_path / str(window), records([1.0, 0.0]), "snapkv", method=method, facts=facts)
        assert rows(folder) == ["snapkv_kernel15 10%" if window != 8 else "snapkv_kernel15 window=8 10%"]


def test_a_press_that_is_not_the_presets_is_named_with_the_press_in_it(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0, 1.0]))
    values = next(entry for entry in entries("method") if entry.name == "kvpress").values()
    for number, press in enumerate(({"name": "AdaKVPress", "press": {"name": "KnormPress"}}, values["press"])):
        method, facts = values | {"press": press}, {"presets": {"method": "kvpress"}}
        folder = write_run(tmp_path / str(number), records([1.0, 0.0]), "kvpress", method=method, facts=facts)
        (row,) = rows(folder)
        assert ("AdaKVPress" in row and "KnormPress" in row) == (number == 0), row


def test_the_place_of_the_cache_is_a_column_and_no_name(tmp_path: Path) -> None:
    write_run(tmp_path, records([0.0, 1.0]), "h2o")
    quest(tmp_path, placement="host")
    assert rows(tmp_path) == ["h2o 10%", "quest 10%"]
    quest(tmp_path, placement="device")
    assert rows(tmp_path) == ["h2o 10%", "quest placement=device 10%", "quest placement=host 10%"]


def test_a_key_that_only_a_null_shares_is_short(tmp_path: Path) -> None:
    for sinks in (0, 4):
        quest(tmp_path, method=MANY | {"sinks": sinks}, windows={"sinks": None, "recent_ratio": None})
    assert set(rows(tmp_path)) == {"quest sinks=0 10%", "quest sinks=4 10%"}


def test_rows_of_edited_code_say_which_is_todays(tmp_path: Path) -> None:
    today = meaning_now("methods.quest")
    folders = [quest(tmp_path), tmp_path / "niah-quest-0123abcd"]
    shutil.copytree(*folders)
    for folder, code, hour in zip(folders, (today, "edited since"), (9, 8), strict=True):
        lines = [json.loads(line) for line in (folder / "examples.jsonl").read_text().splitlines()]
        bare = [{key: line[key] for key in line if key not in ("run", "sha256")} for line in lines]
        write_lines(folder / "examples.jsonl", bare)
        facts = {"identity_sha256": folder.name, "started": f"2026-01-01T0{hour}:30:00+00:00"}
        rewrite(folder, **facts, identity={"code": {"methods.quest": code}, "core": 2})
    [table] = comparisons([load(folder) for folder in folders])
    [said] = code_versions(table.entries)
    assert said.startswith("quest: versions of its code (methods.quest): ")
    mark = folders[0].name[-8:-4]
    assert f"quest #{mark} 10% began 2026-01-01 09:30 with the code of today" in said
    assert "quest #0123 10% began 2026-01-01 08:30" in said
    assert said.count("of today") == 1
