"""The table that a reader sees first: narrow, with few lines that say what was lost and how sure that is."""

from __future__ import annotations

import csv
import io
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
from harness.reports.columns import overview
from harness.reports.document import as_markdown, as_rows, as_text
from harness.reports.leaderboard import Row, command_of, leaderboard, published_tables
from harness.reports.overview import WIDTH, lines
from harness.reports.page import page
from harness.reports.papers import PUBLISHED
from harness.results.files import read_csv, unescaped, write_csv
from harness.results.records import StoreError
from tests.fake_records import record, records, table_of, write_run
from tests.harness.reports.test_pictures import BROWSER, opened

TOGETHER = "read 32.5 % of the prompt, not 10.0 % (1 of 4 prompts whole): its windows hold 33 tokens"
SPARSE: dict[str, Any] = {"attended_prompt": 10.0, "attended_total": 12.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(folder: Path) -> list[str]:
    table = table_of(folder)
    return lines(table)


def test_it_is_narrow_and_says_who_lost_and_what_stays_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, records([1.0] * 12))
    write_run(tmp_path, records([0.0] * 12, **SPARSE), "h2o", budget=0.1)
    write_run(tmp_path, records([1.0] * 11 + [0.0], **SPARSE), "quest", budget=0.1)
    assert report.main([str(tmp_path)]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert max(map(len, text)) <= WIDTH
    assert "--details" in last
    compared, apart, alike = shown(tmp_path)
    assert compared.startswith("12 prompts")
    assert "h2o 10% -100" in apart
    assert "quest" not in apart
    assert "quest 10%" in alike
    assert "h2o" not in alike


def test_many_rows_still_fit(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0] * 12))
    for place in range(20):
        write_run(tmp_path, records([0.0] * 12, **SPARSE), f"method{place}", budget=0.1)
        write_run(tmp_path, records([1.0] * 12, **SPARSE), f"another{place}", budget=0.1)
    text = shown(tmp_path)
    assert max(map(len, text)) <= WIDTH - 2
    assert " more" in text[1]
    assert " more" in text[2]


def test_a_row_that_stands_alone_is_compared_with_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0] * 4), dtype="bfloat16")
    write_run(tmp_path, records([0.0] * 4, **SPARSE), "quest", budget=0.1)
    assert "quest 10%, because" in shown(tmp_path)[1]


def test_a_long_caution_keeps_its_end_and_others_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0] * 12))
    for place in range(4):
        lines = records([1.0] * 12, attended_prompt=90.0)
        facts = {"cautions": [f"{place} " + "a long caution " * 9]}
        write_run(tmp_path, lines, f"a_method_of_a_long_name_{place}", budget=0.1, facts=facts)
    last = shown(tmp_path)[-1]
    assert len(last) <= WIDTH - 2
    assert last.endswith("more with --details.")


def test_it_names_thoughts_another_rotation_and_why_all_was_read(tmp_path: Path) -> None:
    read = {"attended_prompt": 100.0, "fallback": "all is read"}
    model = {"name": "tiny", "revision": None, "rope": {"rope_type": "yarn", "factor": 4}}
    write_run(tmp_path, records([1.0], thought_tokens=0, **read), "quest", budget=0.1, thinking="20", model=model)
    table = table_of(tmp_path)
    assert table.title.endswith("thinking=20 model.rope={rope_type: yarn,factor: 4}")
    text = "\n".join(shown(tmp_path))
    assert "1 prompt of 100 tokens" in text
    assert "quest 10%: 0 of 1 answers thought, though thinking=20" in text
    assert "† budget not kept: quest 10% read 100.0 % of the prompt, not 10.0 %: all is read" in text


def test_a_budget_that_was_not_kept_is_marked_in_every_form(tmp_path: Path) -> None:
    """One of twelve prompts was read whole, which the mean hardly shows; a number of tokens is a limit."""
    facts = {"presets": {"method": "m", "task": "niah", "model": "tiny"}}
    few = records([1.0] * 11, attended_prompt=9.5)
    whole = record("whole", attended_prompt=100.0, fallback="its windows hold 33 tokens")
    write_run(tmp_path, [*few, whole], "snapkv", budget=0.2, dense_layers=[0], facts=facts)
    quest = {"_target_": "methods.quest.Quest", "dense_layers": [0, 1]}
    write_run(tmp_path, records([1.0] * 12, attended_prompt=30.0), "quest", budget=20, facts=facts, method=quest)
    for method, budget, read in (("h2o", 60, 30.0), ("tova", 0.3, 30.0), ("sparq", 0.3, 20.0)):
        write_run(tmp_path, records([1.0] * 12, attended_prompt=read), method, budget=budget, facts=facts)
    said = {
        "quest": "read 30 tokens of the prompt, not 20: method.dense_layers=[0, 1] read everything",
        "sparq": "read 20.0 % of the prompt, not 30.0 %",
        "snapkv": "read 1 of 12 prompts whole, not 20.0 %: its windows hold 33 tokens", "h2o": None, "tova": None,
    }  # fmt: skip
    for method in ("pqcache", "infllm"):
        write_run(tmp_path, [*records([1.0] * 3, attended_prompt=10.0), whole], method, budget=0.1, facts=facts)
    said |= dict.fromkeys(("pqcache", "infllm"), TOGETHER)
    table = table_of(tmp_path)
    assert {entry.summary["method"]: entry.summary["budget"]["not_kept"] for entry in table.entries} == said
    assert as_markdown([table]).count(TOGETHER) == 1
    write_csv(tmp_path / "rows.csv", as_rows([table]))
    forms = [as_markdown([table]), as_text([table]), page([table], []), leaderboard([tmp_path])]
    for form in forms:
        cells = set(re.findall(r"\b\d+\\?%?†?(?= |<)", form))
        assert {"20†"} <= cells
        assert {"60"} <= cells
    assert {row["method"]: row["budget.not_kept"] or None for _, row in read_csv(tmp_path / "rows.csv")} == said


def test_drawn_answers_are_named_as_such_and_as_cut_off(tmp_path: Path) -> None:
    drawn = [record(f"q{n // 4}/sample {n % 4}", unit=f"q{n // 4}", stop="length") for n in range(8)]
    write_run(tmp_path, drawn, generation={"samples": 4, "temperature": 0.8})
    first, *_, caution = shown(tmp_path)
    assert first.startswith("2 prompts of 100 tokens x 4 answers at temperature 0.8; score: pass@1, ")
    assert caution == "Caution: answers ran into the token limit: full 8 of 8."


def test_a_budget_of_prompt_and_answer_shows_what_compares(tmp_path: Path) -> None:
    use = {"counts": "prompt and answer", "extra_rows": 128}
    write_run(tmp_path, records([1.0] * 4))
    write_run(tmp_path, records([1.0] * 4, **SPARSE), "rkv", budget=10, facts={"budget_use": use})
    write_run(tmp_path, records([1.0] * 4, **SPARSE), "quest", budget=0.1)
    fewer = {"attended_prompt": 2.0, "attended_p50": 2.0, "capped_share": 0.25}
    write_run(tmp_path, records([1.0] * 4, **fewer), "vattention", budget=0.1)
    table = table_of(tmp_path)
    columns = {column.head: column.cells for column in overview(table)}
    assert "10+128 in all" in columns["budget"]
    assert columns["read\nin all"].count("12.0") == 2
    text = "\n".join(lines(table))
    assert "Caution: budgets differ: counts=prompt and answer: rkv 10+128 in all; " in text
    assert "vattention 10% read" not in text
    assert "vattention 10%: the budget cut 25.0 % of the samples short, so their error has no bound" in text


def test_what_must_be_wrong_comes_first_and_is_red_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, records([0.0] * 14))
    quest = write_run(tmp_path, records([1.0] * 14, **SPARSE), "quest", budget=0.1)
    alarm = next(line for line in shown(tmp_path) if line.partition(":")[0] in ("ALARM", "Caution"))
    assert alarm.startswith("ALARM: quest 10%")
    for name, red in (("1", False), ("", True)):
        monkeypatch.setenv("NO_COLOR", name)
        screen = Terminal()
        monkeypatch.setattr("sys.stdout", screen)
        report.print_report([quest])  # Full is found in its folder
        assert ("\033[1;31m  ALARM:" in screen.getvalue()) == red
        assert "ALARM: quest 10%" in screen.getvalue()


# The page of all published tables: its rows, the commands that make them, and what it does in a browser.


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
    ("column", "cell"), [("warnings", "oops"), ("score.mean", "high"), ("budget.asked", "inf"), ("command", "'")]
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
            _check(own, composed(shlex.split(command.partition(" -m harness")[2])))
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


@pytest.mark.parametrize("words", [[], ["DIR", "--leaderboard", "x.html", "--figure", "budget"]])
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
