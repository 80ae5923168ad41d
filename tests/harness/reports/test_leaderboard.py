"""The page of all published tables: its rows, the commands that make them, and what it does in a browser."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.commands import report
from harness.config.catalogue import flatten
from harness.config.compose import composed
from harness.reports.leaderboard import Row, command_of, leaderboard, published_tables
from harness.reports.papers import PUBLISHED
from harness.results.files import unescaped, write_csv
from harness.results.records import StoreError
from tests.harness.reports.test_page import BROWSER, opened

TASK = "task=ruler 'task.tasks=[niah_single_2]' model=smollm2"


def row(label: str, task: str = TASK, **changes: Any) -> dict[str, Any]:
    preset = label.partition(" ")[0]
    module = "kvpress" if preset.startswith("press_") else preset.removesuffix("_tuned")
    return {
        "label": label, "presets.method": preset, "method": module, "task": "ruler", "presets.task": "ruler",
        "model": "SmolLM2", "budget.asked": "" if preset == "full" else 0.2, "protocol": "prompt", "seed": 42,
        "num_examples": 30, "prompt_tokens.min": 1000, "prompt_tokens.median": 1325.0, "prompt_tokens.max": 1500,
        "score.mean": 0.5, "score.ci95.low": 0.4, "score.ci95.high": 0.6, "full.p_holm": "", "tt2t_s.p50": "",
        "memory.kv_device_bytes": 2**20, "cpu": "A CPU", "commit": "0123456789", "started": "2026-11-22T10:00",
        "command": f"python -m harness method={preset} {task} data.root=../my/data",
    } | changes  # fmt: skip


ROWS = [
    row("full"),
    row("pqcache", **{"full.diff": -0.2, "full.ci95.low": -0.3, "full.ci95.high": -0.1, "full.p_holm": 0.001}),
    row("pqcache_tuned", **{"score.mean": 0.7}),
    row("snapkv codec=tq4", **{"command": f"python -m harness method=snapkv {TASK} codec=tq4", "score.mean": 0.1}),
    row("tova", **{"budget.asked": 512.0, "budget.counts": "prompt and answer", "score.mean": 0.3}),
    row("press_gone<b>"),
    row("streaming", task="task=niah", **{"presets.task": "niah"}),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    times = [own | {"tt2t_s.p50": 0.25, "num_examples": 3} for own in ROWS[:2]]
    for name, rows in {"made": ROWS, "made_times": times}.items():
        keys = dict.fromkeys(key for own in rows for key in own)
        with open(tmp_path / f"{name}.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(keys))
            writer.writeheader()
            writer.writerows(rows)
    (tmp_path / "other.csv").write_text("kernel,bytes\nx,1\n")
    return tmp_path


def cells(page: str) -> Iterator[list[str]]:
    """Yield the texts of the cells of each body row."""
    for line in re.findall(r"<tr data.*?</tr>", page, re.DOTALL):
        yield [unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", line, re.DOTALL)]


def test_rows_stand_with_their_prompts_and_say_what_was_not_measured(folder: Path) -> None:
    assert [[kept.own["label"] for kept in table.rows] for table in published_tables([folder])] == [
        [own["label"] for own in ROWS[:-1]], ["streaming"]
    ]  # fmt: skip
    page = leaderboard([folder])
    full, pqcache, tuned, coded, tova, gone, streaming = cells(page)
    assert full[:5] == ["full", "none", "50.0 [40, 60]", "reference", "reference"]
    assert pqcache[:5] == ["pqcache", "20%", "50.0 [40, 60]", "-20.0 [-30, -10]*", "not measured"]
    assert [("250" in shown) for shown in (full, pqcache, tuned)] == [True, True, False]  # ms, from made_times
    assert [shown[-3] for shown in (full, pqcache, tuned, coded)] == ["reference", "authors'", "tuned", "other"]
    assert [shown[-2] for shown in (full, pqcache, coded)] == ["reads everything", "reads a part", "evicts + quantises"]
    assert tova[1] == "512 in all"
    assert "This version lacks press_gone<b>; commit 0123456789 has it." in gone[-1]
    assert "data.root=DATA" in streaming[-1]
    assert "../my/data" not in page
    assert "A CPU, threads unknown, torch unknown, commit 0123456; 2026-11-22" in page
    assert "TT2T and TPOT: 3 prompts" in page
    places = re.findall(r"docs/\w+\.md|results/published/\w+", page)  # of what has no rows here
    assert [(PUBLISHED.parents[1] / place).exists() for place in places] == [True, True]


def test_no_cell_is_a_formula_and_all_are_read_back(tmp_path: Path) -> None:
    """`NAME` of a plug-in of the user's own can be any text; numbers stay numbers."""
    formulas = {"model": "@SUM(1)", "presets.task": "+1+cmd", "seed": "\t=1", "cpu": "\r=1", "=x": "-x", "note": "'=x"}
    given = row(
        '=HYPERLINK("http://x","y")', **formulas, **{"full.diff": -0.5, "other": "'x", "low": "-5", "end": "a\rb"}
    )
    write_csv(tmp_path / "made.csv", [given])
    with open(tmp_path / "made.csv", encoding="utf-8", newline="") as file:
        written = [cell for line in csv.reader(file) for cell in line]
    assert [cell for cell in written if cell[:1] in set("=+-@\t\r")] == ["-0.5", "-5"]
    [[kept]] = [table.rows for table in published_tables([tmp_path])]
    assert kept.own == {key: str(value) for key, value in given.items()}
    [back] = pd.read_csv(tmp_path / "made.csv").map(unescaped).rename(columns=unescaped).to_dict("records")
    assert {key: back[key] for key in formulas} == formulas


@pytest.mark.parametrize(
    ("column", "cell"),
    [("warnings", "oops"), ("score.mean", "high"), ("budget.asked", "inf"), ("command", "'")],
)
def test_a_cell_that_cannot_be_read_is_named(tmp_path: Path, column: str, cell: str) -> None:
    write_csv(tmp_path / "made.csv", [row("full"), row("quest", **{column: cell})])
    with pytest.raises(StoreError, match=rf"made.csv, row 3, column {column}: .* is no .*; correct it, or"):
        leaderboard([tmp_path])


def test_a_file_that_is_cut_or_lacks_a_column_is_named(tmp_path: Path) -> None:
    write_csv(tmp_path / "made.csv", [{key: cell for key, cell in row("full").items() if key != "model"}])
    with pytest.raises(StoreError, match=r"made.csv, row 2: there is no column model; correct it, or"):
        leaderboard([tmp_path])
    text = (tmp_path / "made.csv").read_text()
    (tmp_path / "made.csv").write_text(text.rpartition(",")[0])
    with pytest.raises(StoreError, match=r"made.csv, row 2: \d+ cells for \d+ columns; make the file again"):
        leaderboard([tmp_path])


@pytest.mark.parametrize("step", [25, pytest.param(1, marks=pytest.mark.slow)])
def test_a_published_command_composes_to_its_row(step: int) -> None:
    kept = [row for table in published_tables([PUBLISHED]) for row in table.rows]
    rows = [own for row in kept for own in (row.own, *row.apart.values())]
    for own in rows[::step]:
        if (command := command_of(own)) is not None:
            _check(own, composed(shlex.split(command)[3:]))
    assert {own["presets.method"] for own in rows if command_of(own) is None} <= {"press_tova"}


def _check(own: Row, config: dict[str, Any]) -> None:
    """Fail unless a configuration has the parameters and settings that a row records."""
    asked = {key: str(config[key]) for key in ("dtype", "device", "batch", "placement", "protocol", "seed")}
    assert asked == {key: own[key] for key in asked}
    if own["budget.asked"]:
        assert config["budget"] == float(own["budget.asked"])
    parameters = flatten(config["method"], "parameters.")
    for key, text in own.items():
        if key.startswith("parameters.") and text:
            value = parameters[key]
            assert text == str(value) or json.loads(text) == value, (key, own["command"])


@pytest.mark.parametrize("words", [[], ["DIR", "--leaderboard", "x.html", "--plots"]])
def test_a_report_of_nothing_or_of_two_things_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        report.main(words)


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_in_a_browser(folder: Path) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    assert report.main([str(folder), "--leaderboard", str(folder / "out" / "page.html")]) == 0
    url = (folder / "out" / "page.html").as_uri()
    with opened(url, color_scheme="dark") as page:
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 23, 26)"
        rows, reset = page.locator("tbody tr:visible th"), page.get_by_role("button", name="Reset")
        assert len(rows.all_inner_texts()) == len(ROWS)
        page.get_by_label("method").select_option("pqcache")
        expect(rows).to_have_text(["full", "pqcache", "pqcache_tuned"])
        assert page.locator("output").inner_text() == "3 rows, 1 tables"
        page.reload()  # the address holds the choice
        expect(rows).to_have_text(["full", "pqcache", "pqcache_tuned"])
        page.get_by_label("setting").select_option("tuned")
        expect(rows).to_have_text(["full", "pqcache_tuned"])
        reset.click()
        page.get_by_label("kind").select_option("quantises")
        expect(rows).to_have_text(["full", "snapkv codec=tq4"])
        page.get_by_label("task").select_option("niah")
        expect(rows).to_have_count(0)
        reset.click()
        head = page.locator("#table-0 thead th", has_text="score")
        for order, first in (("descending", "pqcache_tuned"), ("ascending", "snapkv codec=tq4")):
            head.get_by_role("button").press("Enter")
            assert head.get_attribute("aria-sort") == order
            assert rows.first.inner_text() == first
        page.locator("summary:visible", has_text="command").first.click()
        page.locator("td button:visible").first.click()
        assert page.evaluate("getSelection().toString()").strip() == f"python -m harness method=snapkv {TASK} codec=tq4"
    with opened(url, java_script_enabled=False) as page:
        assert page.locator("tbody tr:visible").count() == len(ROWS)
        assert page.locator("form:visible, button:visible").count() == 0
