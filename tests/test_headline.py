"""The headline tables and the figure of README say what their CSV files hold, and what is not measured yet."""

from __future__ import annotations

import csv
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MIB = 2**20


@pytest.fixture
def headline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The generator, which finds its files in `tmp_path`."""
    spec = spec_from_file_location("headline", ROOT / "docs" / "headline.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PUBLISHED", tmp_path)
    return module


def line(typed: str, score: float, **changes: Any) -> dict[str, Any]:
    module = "kvpress" if typed.startswith("press_") else typed.partition("_")[0]
    return {
        "method": module, "presets.method": typed, "model": "SmolLM2", "num_examples": 100,
        "prompt_tokens.median": 1325, "budget.asked": "" if typed == "full" else 0.2, "budget.attended.share": 0.2,
        "score.mean": score, "score.ci95.low": score - 0.1, "score.ci95.high": score + 0.1, "full.p_holm": 0.2,
        "likelihood.full.diff": 0.5, "likelihood.full.ci95.low": 0.25, "likelihood.full.ci95.high": 0.75,
        "likelihood.full.p_holm": 0.01, "memory.kv_device_bytes": 20 * MIB, "memory.kv_host_bytes": 70 * MIB,
        "memory.kv_disk_bytes": 0, "memory.moved_bytes_per_step": 5 * MIB, "memory.read_bytes_per_step": 8 * MIB,
        "tt2t_s.p50": 0.9, "tpot_s.p50": 0.03, "dtype": "bf16", "batch": 8, "likelihood.mean": 0.5,
    } | changes  # fmt: skip


LINES = [line("press_snapkv", 0.7), line("sparq", 0.6), line("quest", 0.5), line("sparq_tuned", 0.4), line("full", 0.8)]


def write(folder: Path, name: str, lines: list[dict[str, Any]]) -> None:
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    (folder / f"{name}.md").write_text("- a note\n- Of 3 pairs of rows, 2 are told apart.\n", encoding="utf-8")


def cells(table: str) -> list[list[str]]:
    return [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ") and ":--" not in row]


def test_a_method_stands_once_as_its_authors_have_it_and_once_tuned(headline: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "a", [*LINES, line("quest", 0.9, **{"budget.asked": 0.1})])
    head, *rows = cells(headline.table("a"))
    assert [row[:2] for row in rows] == [
        ["full", ""], ["press_snapkv", "kvpress"], ["sparq", "authors'"], ["sparq", "tuned"], ["quest", "authors'"]
    ]  # fmt: skip
    assert rows[2][2:] == ["60.0 [50, 70]", "+0.500 [+0.250, +0.750]\\*", "20.0", "20.0", "70.0", "90.0", "5.0"]
    assert head[-1] == "moved (MiB/step)"


def test_what_is_measured_has_a_column_and_what_is_not_a_sentence(headline: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "a", LINES)
    write(tmp_path, "a_times", LINES[1:])  # one row has no time yet
    write(tmp_path, "a_read", LINES[::-1])
    said = headline.table("a")
    head, *rows = cells(said)
    assert head[-1] == "read (MiB/step)"
    assert {row[-1] for row in rows} == {"8.0"}
    assert "Not measured yet: times, which need" in said
    assert "bytes read per step" not in said
    write(tmp_path, "a_times", LINES[::-1])
    said = headline.table("a")
    head, *rows = cells(said)
    assert head[-2:] == ["TT2T (ms)", "TPOT (ms)"]
    assert rows[0][-2:] == ["900.0", "30.0"]
    assert "Not measured yet" not in said


def test_a_noise_floor_stands_below_the_table(headline: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "a", LINES)
    assert "Noise floor" not in headline.table("a")
    full = [
        line("full", score, dtype=dtype, batch=batch, **{"likelihood.mean": nats})
        for dtype, batch, score, nats in (("bf16", 1, 0.8, 0.5), ("bf16", 8, 0.79, 0.5), ("fp32", 8, 0.785, 0.5011))
    ]
    write(tmp_path, "a_floor", full)
    assert (
        "\n[Noise floor](../results/published/tables/a_floor.md): the means of Full over these prompts, above and in "
        "bf16 and fp32 with batches of 1 and 8, differ by at most 1.5 points and 0.0011 nats per token.\n"
    ) in headline.table("a")


def test_a_page_holds_the_table_with_what_can_be_concluded_of_it(headline: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "a", LINES)
    page = headline.written("before\n<!-- headline of a -->\nold\n<!-- end -->\nafter")
    assert page == f"before\n<!-- headline of a -->\n\n{headline.table('a')}\n<!-- end -->\nafter"
    assert "\n100 prompts (median 1325 tokens). " in page
    assert "\nOf 3 pairs of rows, 2 are told apart.\n" in page
    assert "a note" not in page
    assert headline.written(page) == page


def test_rows_of_unlike_numbers_of_prompts_are_never_mixed(headline: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "a", [*LINES[1:], line("oracle", 0.8, num_examples=40)])
    with pytest.raises(ValueError, match=r"rows have \[40, 100\] prompts"):
        headline.table("a")


def test_the_figure_shows_tuned_methods_solid_and_all_that_they_hold(headline: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "a", [*LINES, line("kivi_2bit", 0.1)])
    score, nats, held, moved = headline.figure("a").axes
    assert [label.get_text() for label in score.get_yticklabels()] == ["kivi_2bit", "quest", "sparq"]  # from below
    points = [dot for dot in score.lines if dot.get_marker() == "o"]
    places = [(round(float(dot.get_xdata()[0])), dot.get_ydata()[0], dot.get_color()) for dot in points]
    assert places == [
        (10, 0, headline.DEVICE), (50, 1, headline.DEVICE), (60, 2, headline.FAINT), (40, 2, headline.DEVICE)
    ]  # fmt: skip
    assert [bar.get_width() for bar in held.patches] == [20, 70] * 3
    assert [bar.get_x() for bar in held.patches] == [0, 20] * 3
    assert [bar.get_width() for bar in moved.patches] == [5] * 3
    assert nats.get_xscale() == "symlog"
