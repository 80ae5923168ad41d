"""Names of rows and tables: as typed, never the same for two, and with every setting that tells them apart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from harness.config.catalogue import entries
from harness.reports.compare import comparisons
from harness.reports.conditions import code_versions
from harness.reports.labels import spelled
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


def test_rows_of_one_name_show_every_parameter_in_which_they_differ(tmp_path: Path) -> None:
    last = list(MANY)[-1]
    for value in (0, 1):
        windows = {"sinks": None, "recent_ratio": None}  # which a key of the method may share a name with
        quest(tmp_path, method=MANY | {last: value, "sinks": value}, windows=windows, placement="host")
    assert set(rows(tmp_path)) == {f"quest {last}={value} sinks={value} 10%" for value in (0, 1)}


def test_settings_that_are_no_default_are_named_where_rows_differ_in_them(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0, 1.0]))
    quest(tmp_path, fidelity=3, dense_layers=[0, 1], new_setting="off")  # which older runs do not have
    write_run(tmp_path, records([0.0, 1.0]), "h2o", dense_layers=[], batch=1)
    *others, last = rows(tmp_path)
    assert others == ["full", "h2o 10%"]
    assert last.split() == ["quest", "dense_layers=[0,1]", "fidelity=3", "10%"]


def test_a_setting_is_named_only_among_methods_that_have_it(tmp_path: Path) -> None:
    """On a GPU prompts come in chunks, but for methods that cannot take them."""
    usual = {"device": "cuda", "graphs": "on", "prefill_chunk": 8192}
    write_run(tmp_path, records([1.0, 1.0]), **usual, overlap="auto")
    write_run(tmp_path, records([0.0, 1.0]), "infllm", **usual | {"prefill_chunk": None}, overlap="off")
    quest(tmp_path, **usual, overlap="off")
    assert set(rows(tmp_path)) == {"full", "infllm 10%", "quest 10%"}
    quest(tmp_path, **usual | {"prefill_chunk": 512}, overlap="on")
    assert ["quest", "prefill_chunk=512", "overlap=on", "10%"] in [row.split() for row in rows(tmp_path)]


def test_runs_that_no_setting_tells_apart_bear_the_mark_of_their_folder(tmp_path: Path) -> None:
    folder = quest(tmp_path / "one" / "runs")
    other = folder.with_name("niah-quest-0123abcd")  # of other sources
    shutil.copytree(folder, other)
    for number, (run, code) in enumerate(((folder, "today's"), (other, "edited since"))):
        started = f"2026-01-01T0{number}:30:00+00:00"
        rewrite(run, started=started, identity_sha256=code, identity={"code": {"methods.quest": code}})
    mark = f"#{folder.name[-8:-4]}"
    assert set(rows(tmp_path)) == {f"quest {mark} 10%", "quest #0123 10%"}
    [table] = comparisons([load(run) for run in (folder, other)])
    [note] = code_versions(table.entries)
    assert "methods.quest" in note
    assert "#0123 10% began" in note
    shutil.rmtree(other)
    again = shutil.copytree(folder, tmp_path / "two" / "runs" / folder.name)
    rewrite(again, identity_sha256="of other sources")
    assert set(rows(tmp_path)) == {f"quest {mark} {place}/runs 10%" for place in ("one", "two")}


def test_null_is_not_shown_and_a_shared_key_bears_its_place(tmp_path: Path) -> None:
    for seed, layers in ((1, None), (2, None), (2, 4)):
        task = {"_target_": "evals.niah.Niah", "lengths": [9], "seed": seed}
        quest(tmp_path, task=task, model={"name": "tiny", "layers": layers})
    told_apart = {title.partition("protocol=prompt ")[2] for title in titles(tmp_path)}
    assert told_apart == {"task.seed=1", "task.seed=2", "task.seed=2 layers=4"}


def test_keywords_of_the_chat_template_part_tables(tmp_path: Path) -> None:
    for keywords in (None, {"effort": "low"}):
        quest(tmp_path, template_kwargs=keywords)
    assert {title.partition("protocol=prompt")[2] for title in titles(tmp_path)} == {
        "",
        " template_kwargs={effort: low}",
    }


def test_values_are_spelled_as_they_are_typed_and_long_ones_stay_short_and_different() -> None:
    values = [True, 0.25, [1, 1, 2], [[0, 1], []], "word", {"effort": "low"}]
    assert [spelled(value) for value in values] == ["true", "0.25", "[1,1,2]", "[[0,1],[]]", "word", "{effort: low}"]
    first, second = (spelled("a long template, " * 9 + end) for end in "ab")
    assert first != second
    assert len(first) == len(second) == 7


def test_a_parameter_that_is_not_the_preset_s_is_named_even_where_no_other_row_has_it(tmp_path: Path) -> None:
    values = next(entry for entry in entries("method") if entry.name == "snapkv_kernel15").values()
    for window in (values["window"], 8):
        facts = {"presets": {"method": "snapkv_kernel15"}}
        method = values | {"window": window}
        folder = write_run(tmp_path / str(window), records([1.0, 0.0]), "snapkv", method=method, facts=facts)
        assert rows(folder) == ["snapkv_kernel15 10%" if window != 8 else "snapkv_kernel15 window=8 10%"]


def test_a_press_that_is_not_the_presets_is_named_with_the_press_in_it(tmp_path: Path) -> None:
    values = next(entry for entry in entries("method") if entry.name == "kvpress").values()
    method, facts = values | {"press": {"name": "AdaKVPress", "press": {"name": "KnormPress"}}}, {}
    facts["presets"] = {"method": "kvpress"}
    [row] = rows(write_run(tmp_path, records([1.0, 0.0]), "kvpress", method=method, facts=facts))
    assert "AdaKVPress" in row
    assert "KnormPress" in row
