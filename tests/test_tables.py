"""`make tables` fills the tables between markers; what nobody measured has no column but a sentence."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from runpy import run_path
from typing import Any

import pandas as pd
import pytest

from harness.config.catalogue import experiments
from harness.results.provenance import code_hash

ROOT = Path(__file__).parents[1]
MIB = 2**20


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Any]:
    """The program, which reads its CSV files from `tmp_path`."""
    program = run_path(str(ROOT / "docs" / "tables.py"))
    program["filled"].__globals__["PUBLISHED"] = tmp_path
    return program


def row(preset: str, score: float, **changes: Any) -> dict[str, Any]:
    return {
        "method": preset.partition("_")[0], "presets.method": preset, "label": preset, "model": "SmolLM2",
        "num_examples": 100, "prompt_tokens.median": 1325, "dtype": "fp32", "batch": 1, "likelihood.mean": 0.1,
        "budget.asked": None if preset == "full" else 0.2,
        "budget.attended.share": 0.2, "score.groups.niah.mean": score, "score.mean": score,
        "score.ci95.low": score - 0.1, "score.ci95.high": score + 0.1, "full.p_holm": 0.2,
        "likelihood.full.diff": 0.5, "likelihood.full.ci95.low": 0.25, "likelihood.full.ci95.high": 0.75,
        "likelihood.full.p_holm": 0.01, "memory.kv_device_bytes": 20 * MIB, "memory.kv_host_bytes": 70 * MIB,
        "memory.kv_disk_bytes": 0, "memory.moved_bytes_per_step": 5 * MIB, "memory.read_bytes_per_step": 8 * MIB,
        "tt2t_s.p50": 0.9, "tpot_s.p50": 0.03,
    } | changes  # fmt: skip


ROWS = [row("sparq", 0.6), row("quest", 0.5), row("sparq_tuned", 0.4), row("full", 0.8)]


def cells(page: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ") and ":--" not in line]


def test_a_page_is_filled_between_its_markers(tables: dict[str, Any], tmp_path: Path) -> None:
    pd.DataFrame(ROWS).to_csv(tmp_path / "a.csv")
    page = tables["filled"]("before\n<!-- rows of a: quest -->\nold\n<!-- end -->\nafter")
    assert page.partition("\n")[0] == "before"
    assert page.rpartition("\n")[2] == "after"
    assert "old" not in page
    full, quest = cells(page)[1:]
    assert full[:4] == ["full", "", "80.0", "80.0 [70, 90]"]
    assert quest[:5] == ["quest", "20", "50.0", "50.0 [40, 60]", "+0.500 [+0.250, +0.750]\\*"]
    assert tables["filled"](page) == page
    not_kept = {"budget.not_kept": "read 5 of 100 prompts whole, not 20.0 %"}
    pd.DataFrame([row("full", 0.8), row("quest", 0.5, **not_kept)]).to_csv(tmp_path / "a.csv")
    marked = tables["filled"](page)
    assert [line[1] for line in cells(marked)[1:]] == ["", "20†"]
    assert "†: the row did not keep its budget." in marked
    rows = [row("full", 0.8), row("rkv", 0.5, **{"budget.asked": 64}), row("snapkv", 0.4, **{"budget.asked": 1.0})]
    pd.DataFrame(rows).to_csv(tmp_path / "a.csv")
    counted = cells(tables["filled"]("<!-- rows of a -->\n<!-- end -->"))
    assert [[line[1], line[-1]] for line in counted] == [
        ["budget", "TPOT (ms)"], ["", "30"], ["64", "30"], ["100 %", "30"]
    ]  # fmt: skip


def test_a_headline_shows_what_was_measured(tables: dict[str, Any], tmp_path: Path) -> None:
    pd.DataFrame([*ROWS, row("quest", 0.9, **{"budget.asked": 0.1})]).to_csv(tmp_path / "a.csv")
    pd.DataFrame(ROWS[::-1]).to_csv(tmp_path / "a_read.csv")
    pd.DataFrame(ROWS).to_csv(tmp_path / "a_times.csv")
    pd.DataFrame([row("full", 0.79)]).to_csv(tmp_path / "a_floor.csv")
    page = tables["filled"]("<!-- headline of a -->\n<!-- end -->")
    head, *lines = cells(page)
    assert [line[:2] for line in lines] == [
        ["full", ""], ["sparq", "authors'"], ["sparq", "tuned"], ["quest", "authors'"]
    ]  # fmt: skip
    numbers = ["20.0", "20.0", "70.0", "90.0", "5.0", "8.0", "900.0", "30.0"]
    assert lines[2][2:] == ["40.0 [30, 50]", "+0.500 [+0.250, +0.750]\\*", *numbers]
    assert head[-1] == "TPOT (ms)"
    assert "most 1.0 points" in page
    score, _, held, moved = tables["figure"]("a").axes
    assert [label.get_text() for label in score.get_yticklabels()] == ["quest", "sparq"]  # from below
    assert [bar.get_width() for bar in held.patches] == [20, 70] * 2
    assert [bar.get_width() for bar in moved.patches] == [5] * 2


def test_a_decode_table_has_a_method_per_row_and_a_length_per_file(tables: dict[str, Any], tmp_path: Path) -> None:
    def write(name: str, tokens: int, methods: list[str]) -> None:
        rows = [
            {"method": one, "tokens": tokens, "tpot_s": [0.01, 0.009, 0.011], "speedup": None, "device_bytes": 3 * MIB}
            for one in methods
        ]
        (tmp_path / name).write_text(json.dumps({"rows": rows}))

    tables["filled"].__globals__["BENCHES"] = tmp_path
    write("long.json", 64, ["full", "quest:page_size=8", "sparq"])
    write("short.json", 32, ["full"])
    head, full, quest = cells(tables["filled"]("<!-- decode of long short: full quest -->\n<!-- end -->"))
    assert head[1].startswith("TPOT at 64")
    assert full[::3] == ["full§", "3", "3"]
    assert quest[:2] == ["quest§", "10.0 (9.00-11.0)"]


def test_a_benchmark_s_row_whose_code_has_changed_is_marked_and_one_whose_code_is_gone_goes(
    tables: dict[str, Any], tmp_path: Path
) -> None:
    tables["filled"].__globals__["BENCHES"] = tmp_path
    today = code_hash("methods.quest")
    stamps = {"quest": {"methods.quest": today}, "sparq": {"methods.sparq": today}, "kivi": {"methods.gone": today}}
    rows = [
        {"method": one, "tokens": 64, "step_s": [0.01, 0.009, 0.011], "speedup": [2, 1, 3], "code": code}
        for one, code in stamps.items()
    ]
    (tmp_path / "layer.json").write_text(json.dumps({"rows": [*rows, {"label": "tova", "error": "takes no mass"}]}))
    page = tables["filled"]("<!-- decode of layer -->\n<!-- end -->")
    assert [line[0] for line in cells(page)] == ["method", "quest", "sparq‡"]
    assert page.count("‡: the code that was timed has changed since.") == 1
    assert "§" not in page


def test_every_published_table_has_an_experiment_that_makes_it() -> None:
    made = {name.removeprefix("tables/") for name in experiments() if name.startswith("tables/")}
    assert made == {file.stem for file in (ROOT / "results" / "published" / "tables").glob("*.csv")}
    recipe = subprocess.run(["make", "-n", "published"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "+experiment=tables/$name" in recipe
    assert all(f" {name} " in recipe.replace(";", " ;") for name in made)


def test_what_papers_print_stands_beside_ours_as_differences_to_full(tables: dict[str, Any], tmp_path: Path) -> None:
    tables["filled"].__globals__["PAPERS"] = tmp_path
    pd.DataFrame(ROWS).to_csv(tmp_path / "a.csv")
    pair = {"source": "A paper", "method": "Quest", "model": "Llama", "config": "4K, a fifth"}
    pd.DataFrame([pair | {"table": "a", "preset": "quest", "full_config": "4K"}]).to_csv(tmp_path / "beside.csv")
    printed = [
        pair | {"task": "niah", "value": 70.5},
        pair | {"task": "vt", "value": 1.0},
        pair | {"method": "full attention", "config": "4K", "task": "niah", "value": 90.0},
    ]
    pd.DataFrame(printed).to_csv(tmp_path / "paper_reference.csv")
    page = tables["filled"]("<!-- beside of a -->\n<!-- end -->")
    assert cells(page) == [
        ["method", "setting", "niah"],
        ["quest", "Llama, 4K, a fifth", "-19.5"],
        ["quest", "SmolLM2, 20 %", "-30.0"],
    ]
