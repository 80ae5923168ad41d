"""A table says on what prompts, machine and code it rests, and which row differs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from harness.commands import report
from harness.reports.compare import comparisons
from harness.reports.conditions import conditions
from harness.results.run_folder import find, load
from tests.fake_records import record, records, write_run


def facts(commit: str = "abcdef0123", dirty: bool = False, **machine: Any) -> dict[str, Any]:
    known = {"cpu": "A CPU", "device_name": "A CPU", "threads": 2, "load_average": [0.1, 0, 0]} | machine
    origin = {"machine": known, "git": {"commit": commit, "dirty": dirty}, "versions": {"torch": "2.13.0"}}
    return {"facts": {"provenance": origin}}


def said(root: Path) -> str:
    [table] = comparisons([load(folder) for folder in find([root])])
    return "\n".join(conditions(table))


def test_what_all_rows_share_is_said_once(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0]), **facts())
    write_run(tmp_path, records([0.0]), "quest", **facts())
    assert said(tmp_path).splitlines() == [
        "prompts: 100 tokens",
        "dtype: float32; device: cpu; machine: A CPU, 2 threads",
        "torch: 2.13.0; commit: abcdef0",
        "settings: seed=0",
    ]


def test_where_rows_differ_each_is_named(tmp_path: Path) -> None:
    for budget in (0.1, 0.2, 0.3):
        write_run(tmp_path, records([0.0]), "quest", budget=budget, **facts())
    write_run(tmp_path, records([1.0]), dtype="bf16", **facts("1234567890", True, threads=8))
    text = said(tmp_path)
    assert "dtype: float32, but bf16 (full)" in text
    assert "machine: A CPU, 2 threads, but A CPU, 8 threads (full)" in text
    assert "commit: abcdef0, but 1234567 (dirty) (full)" in text


def test_a_gpu_is_named_beside_its_cpu(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0]), device="cuda", **facts(device_name="A GPU"))
    assert "machine: A GPU, A CPU, 2 threads" in said(tmp_path)


def test_a_run_that_knows_nothing_of_its_machine_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0]))
    assert "machine: unknown" in said(tmp_path)
    assert "commit: unknown" in said(tmp_path)


def test_prompts_are_as_long_as_they_are(tmp_path: Path) -> None:
    tokens = {512: (500, 510), 2048: (1315, 1320, 2040)}
    lines = [record(f"{n}/{t}", prompt_tokens=t, data={"length": n}) for n, some in tokens.items() for t in some]
    write_run(tmp_path, lines)
    write_run(tmp_path, lines, "quest")  # the same prompts count once
    assert "prompts: length=512: 500 to 510 tokens, median 505; length=2048: 1315 to 2040 tokens, median 1320" in said(
        tmp_path
    )


def test_settings_of_all_rows_that_are_no_default_are_said(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0]), chat="none", dense_layers=[])
    write_run(tmp_path, records([0.0]), "quest", chat="none", dense_layers=[0])
    assert "settings: seed=0, chat=none" in said(tmp_path)
    assert "dense_layers" not in said(tmp_path)  # the row says it


def test_text_markdown_and_csv_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, records([1.0]), **facts())
    assert (
        report.main([str(tmp_path), "--details", "--md", str(tmp_path / "x.md"), "--csv", str(tmp_path / "x.csv")]) == 0
    )
    for text in (capsys.readouterr().out, (tmp_path / "x.md").read_text()):
        for words in ("prompts: 100 tokens", "dtype: float32", "A CPU, 2 threads", "commit: abcdef0"):
            assert words in text
    with (tmp_path / "x.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert (row["dtype"], row["device"], row["cpu"], row["threads"]) == ("float32", "cpu", "A CPU", "2")
    assert (row["commit"], row["dirty"], row["prompt_tokens.median"]) == ("abcdef0123", "False", "100")
