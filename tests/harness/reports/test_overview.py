"""The table that a reader sees first: narrow, with few lines that say what was lost and how sure that is."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from harness.commands import report
from harness.reports.columns import overview
from harness.reports.compare import comparisons
from harness.reports.document import as_latex, as_markdown, as_rows, as_text
from harness.reports.leaderboard import leaderboard
from harness.reports.overview import WIDTH, lines
from harness.reports.page import page
from harness.results.files import read_csv, write_csv
from harness.results.run_folder import load
from tests.fake_records import record, records, write_run

TOGETHER = "read 32.5 % of the prompt, not 10.0 % (1 of 4 prompts whole): its windows hold 33 tokens"
SPARSE: dict[str, Any] = {"attended_prompt": 10.0, "attended_total": 12.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(folder: Path) -> list[str]:
    [table] = comparisons([load(file.parent) for file in sorted(folder.rglob("run.json"))])
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
    [table] = comparisons([load(file.parent) for file in tmp_path.rglob("run.json")])
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
    [table] = comparisons([load(file.parent) for file in tmp_path.rglob("run.json")])
    assert {entry.summary["method"]: entry.summary["budget"]["not_kept"] for entry in table.entries} == said
    assert as_markdown([table]).count(TOGETHER) == 1
    write_csv(tmp_path / "rows.csv", as_rows([table]))
    forms = [as_latex([table]), as_markdown([table]), as_text([table]), page([table], []), leaderboard([tmp_path])]
    for form in forms:
        cells = set(re.findall(r"\b\d+\\?%?†?(?= |<)", form))
        assert {"20†"} <= cells
        assert {"60"} <= cells
    assert "(†: budget not kept)}" in forms[0]
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
    [table] = comparisons([load(file.parent) for file in tmp_path.rglob("run.json")])
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
