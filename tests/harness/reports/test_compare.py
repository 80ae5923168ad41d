"""Tables of random scores do not contradict themselves; stamps; corrected p; methods held against methods."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals import stats
from evals.stats import shift
from harness.commands import report
from harness.config.catalogue import entries
from harness.reports.against import against
from harness.reports.columns import measurements
from harness.reports.compare import Comparison, ReportRow, comparisons, corrected
from harness.reports.conditions import code_versions, conditions
from harness.reports.document import as_rows
from harness.reports.labels import spelled
from harness.reports.notes import notes, stamp_meanings, stamps
from harness.results.records import Record, StoreError
from harness.results.run_folder import StoredRun, find, load
from harness.results.summary import summarise
from harness.terminal.tables import probability
from tests.fake_records import config, record, records, rewrite, table_of, write_run

SPARSE = {"attended_prompt": 10.0, "attended_total": 12.0}
INFO = {"status": "complete", "task": "niah", "task_info": {"chance": 0.0, "metric": "recall"}}


def random_table(rng: np.random.Generator, folder: Path) -> Comparison:
    """Full and eight methods, 2 to 40 examples in one to three groups, scores right or wrong or in quarters."""
    size, groups, levels = rng.integers(2, 41), rng.integers(1, 4), rng.choice([1, 4])
    full = rng.integers(levels + 1, size=size) / levels
    scores = [full]
    for part in rng.random(8):
        changed, others = rng.random(size) < part, rng.integers(levels + 1, size=size) / levels
        scores.append(np.where(changed, others * rng.random() // 0.25 / 4, full))
    runs = []
    for values in scores:
        lines = [record(f"e{i}", group=f"g{i % groups}", score=float(v), **SPARSE) for i, v in enumerate(values)]
        runs.append(StoredRun(folder, config("quest"), dict(INFO), lines, "complete"))
    rows = [summarise(r.records, config=r.config, info=INFO | {"method": "quest"}, full=runs[0].records) for r in runs]
    entries = [ReportRow(r, runs[0], row, "quest") for r, row in zip(runs[1:], rows[1:], strict=True)]
    return Comparison("t", "recall", corrected(entries, has_scores=True))


def excludes_zero(ci: list[float]) -> bool:
    return ci[0] > 0 or ci[1] < 0


def test_no_table_contradicts_itself(tmp_path: Path) -> None:
    rng, marks, seen = np.random.default_rng(0), 0, 0
    for _ in range(12):
        table = random_table(rng, tmp_path)
        cells = {column.head: column.cells for column in measurements(table)}
        assert [entry.score_p for entry in table.entries] == stats.holm([e.summary["full"]["p"] for e in table.entries])
        for number, entry in enumerate(table.entries):
            full, seen = entry.summary["full"], seen + 1
            assert (full["p"] < 0.05) == excludes_zero(full["ci95"])
            assert not entry.score_differs or excludes_zero(full["ci95"])
            marks += entry.score_differs
            ends = [float(end) for end in re.findall(r"[-+0-9.]+", cells["vs full"][number].partition("[")[2])]
            shown = cells["p"][number].rstrip("*").lstrip("<")
            assert excludes_zero(ends) == (float(shown) < 0.05)
    assert 10 < marks < seen  # the rule was tried on both sides


@pytest.mark.parametrize(("p", "shown"), [(0.04996, "0.0500"), (0.0504, "0.0504"), (0.049, "0.049"), (0.0001, "<.001")])
def test_p_shows_its_side_of_the_level(p: float, shown: str) -> None:
    assert probability(p) == shown


@pytest.mark.parametrize(
    ("stamp", "lines", "changes"),
    [
        ("", {}, {"facts": {"host_is_cpu": True}}),  # nothing lies there
        ("S", {}, {"facts": {"simulated": True}}),
        ("T", {}, {"trace": "on"}),
        ("HD", {"kv_host_bytes": 10, "kv_disk_bytes": 10}, {"facts": {"host_is_cpu": True}}),
        ("", {"kv_disk_bytes": 10}, {"facts": {"host_is_cpu": False}}),
        ("X", {"lost_turns": 2, "lost_to": "the disk is full"}, {}),
        ("P", {}, {"facts": {"plain_steps": "a step waits for a value"}}),
        ("C", {}, {"facts": {"earlier": [{"status": "interrupted", "started": "2026-01-01T00:00:00+00:00"}]}}),
        ("F", {}, {"status": "failed"}),
        ("!", {"stop": "length"}, {}),
    ],
)
def test_a_row_has_its_stamp(tmp_path: Path, stamp: str, lines: dict[str, Any], changes: dict[str, Any]) -> None:
    status = changes.pop("status", "complete")
    write_run(tmp_path, records([1.0] * 12, **lines), "full", status, **changes)
    table = table_of(tmp_path)
    assert stamps(table.entries[0], table) == stamp
    legend = {f"{letter}: {meaning}": letter for letter, meaning in stamp_meanings().items()}
    assert [legend[note] for note in notes(table) if note in legend] == [*stamp.replace("!", "")]


def test_conditions_say_which_row_differs(tmp_path: Path) -> None:
    for budget in (0.1, 0.2, 0.3):
        write_run(tmp_path, records([0.0]), "quest", budget=budget, chat="none")
    lines = [record(f"{t}", prompt_tokens=t, data={"length": 2048}) for t in (1315, 1320, 2040)]
    write_run(tmp_path, lines, dtype="bf16", device="cuda", chat="none")
    prompts, machine, _, settings = conditions(table_of(tmp_path))
    assert "1315 to 2040 tokens" in prompts
    assert [part.rpartition("but ")[2] for part in machine.split("; ")[:2]] == ["bf16 (full)", "cuda (full)"]
    assert settings == "settings: seed=0, chat=none"


GOOD, BAD = [1.0] * 12, [0.0] * 8 + [1.0] * 4
CHEAP, DEAR = [0.1 + 0.01 * i for i in range(12)], [0.9 + 0.02 * i for i in range(12)]


def scored(scores: list[float], costs: list[float]) -> list[Record]:
    return [
        record(f"e{i}", score=score, tokens=[i, 1, 2, int(score)], attended_prompt=10.0, answer_nll=cost)
        for i, (score, cost) in enumerate(zip(scores, costs, strict=True))
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for budget in (0.1, 0.2):
        write_run(tmp_path, scored(GOOD, CHEAP), "snapkv", budget=budget)
        write_run(tmp_path, scored(BAD, DEAR), "quest", budget=budget)
    write_run(tmp_path, scored(BAD, DEAR), "h2o", budget=0.3)
    return tmp_path


def test_a_method_stands_for_its_row_of_the_same_budget(root: Path) -> None:
    [table] = against([table_of(root)], "snapkv")
    others = [entry.label.removeprefix("quest against ") for entry in table.entries]
    assert others == ["snapkv 10%", "snapkv 20%"]
    score, cost = stats.paired(BAD, GOOD, [""] * 12), shift(DEAR, CHEAP)
    rows = as_rows([table])
    for row in rows:
        assert (row["full.diff"], row["full.p"]) == (score.diff, score.p)
        assert (row["likelihood.full.diff"], row["likelihood.full.p"]) == (pytest.approx(cost.diff), cost.p)
    keys = ("full", "likelihood.full")
    adjusted = stats.holm([row[f"{key}.p"] for key in keys for row in rows])
    assert [row[f"{key}.p_holm"] for key in keys for row in rows] == adjusted


def test_a_row_may_be_named_with_its_budget_or_wrongly(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [table] = against([table_of(root)], "snapkv 20%")
    others = ["h2o 30%", "quest 10%", "quest 20%", "snapkv 10%"]
    assert [entry.label.partition(" ")[0] + f" {entry.title.rpartition(' ')[2]}" for entry in table.entries] == others
    with pytest.raises(StoreError, match="mean snapkv"):
        against([table_of(root)], "snapvk")
    assert report.main([str(root), "--against", "quest 10%", "--md", str(root / "x.md")]) == 0
    assert "Against quest 10%:" in capsys.readouterr().out
    assert "Against quest 10%:" in (root / "x.md").read_text()


# Names of rows and tables: as typed, never the same for two, and with every setting that tells them apart.


MANY = {"_target_": "methods.quest.Quest", **{f"a_parameter_with_a_long_name_{n}": 0 for n in range(9)}}


def rows(root: Path) -> list[str]:
    """Label and budget of each row, all of one table."""
    table = table_of(root)
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
    values = entries("method")["snapkv_kernel15"].values()
    for window in (values["window"], 8):
        facts = {"presets": {"method": "snapkv_kernel15"}}
        method = values | {"window": window}
        folder = write_run(tmp_path / str(window), records([1.0, 0.0]), "snapkv", method=method, facts=facts)
        assert rows(folder) == ["snapkv_kernel15 10%" if window != 8 else "snapkv_kernel15 window=8 10%"]


def test_a_press_that_is_not_the_presets_is_named_with_the_press_in_it(tmp_path: Path) -> None:
    values = entries("method")["kvpress"].values()
    method, facts = values | {"press": {"name": "AdaKVPress", "press": {"name": "KnormPress"}}}, {}
    facts["presets"] = {"method": "kvpress"}
    [row] = rows(write_run(tmp_path, records([1.0, 0.0]), "kvpress", method=method, facts=facts))
    assert "AdaKVPress" in row
    assert "KnormPress" in row
