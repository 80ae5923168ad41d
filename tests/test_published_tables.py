"""docs/comparison.md shows what the committed tables hold."""

from __future__ import annotations

import csv
from pathlib import Path
from runpy import run_path

ROOT = Path(__file__).parents[1]
tables = run_path(str(ROOT / "docs" / "tables.py"))


def test_the_page_holds_the_numbers_of_the_tables() -> None:
    page = tables["PAGE"].read_text(encoding="utf-8")
    assert tables["TABLE"].search(page)
    assert tables["written"](page) == page, "run: python docs/tables.py"


def test_every_published_table_is_an_experiment() -> None:
    experiments = {file.stem for file in (ROOT / "conf" / "experiment" / "tables").glob("*.yaml")}
    assert {file.stem for file in tables["PUBLISHED"].iterdir()} <= experiments


def scores(table: str, key: str = "presets.method") -> dict[str, float]:
    """Mean scores from 0 to 100, by method or another `key`: Full's, and the others' at the table's largest budget."""
    with (tables["PUBLISHED"] / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    largest = max(row["budget.asked"] for row in rows)
    return {row[key]: 100 * float(row["score.mean"]) for row in rows if row["budget.asked"] in (largest, "")}


def test_sentences_of_the_page_say_what_the_tables_hold() -> None:
    of_2k, of_4k, of_8k = (scores(f"ruler_{length}") for length in ("2k", "4k", "8k"))
    later = scores("ruler_question_later")
    window = scores("ablation_pqcache", "label")

    def loss(method: str, table: dict[str, float]) -> float:
        return table["full"] - table[method]

    def kept(method: str, table: dict[str, float]) -> str:
        return f"{100 * table[method] / table['full']:.0f}"

    def ablated(sinks: int, recent: float) -> float:
        return window[f"pqcache method.sinks={sinks} recent_ratio={recent}"]

    held = [
        f"PQCache and Quest lose {loss('pqcache', of_8k):.0f} and {loss('quest', of_8k):.0f} points at 8192**, but "
        f"{loss('pqcache', of_2k):.0f} and {loss('quest', of_2k):.0f} at 2048",
        f"they keep {kept('infinigen', of_2k)} and {kept('infllm', of_2k)} % of Full's score at 2048 tokens, "
        f"{kept('infinigen', of_4k)} and {kept('infllm', of_4k)} % at 4096, and {kept('infinigen', of_8k)} and "
        f"{kept('infllm', of_8k)} % at 8192",
        f"The window costs {ablated(4, 0.25) - ablated(4, 0.5):.0f} points with 4 sinks and "
        f"{ablated(32, 0.25) - ablated(32, 0.5):.0f} with 32.",
        f"The sinks gain {ablated(32, 0.25) - ablated(4, 0.25):.0f} points or cost "
        f"{ablated(4, 0.5) - ablated(32, 0.5):.0f},",
        f"RocketKV loses {of_2k['rocketkv'] - later['rocketkv']:.0f}, because",
        f"it loses {of_2k['infinigen'] - later['infinigen']:.0f}, or "
        f"{of_2k['infinigen_alpha99'] - later['infinigen_alpha99']:.0f} with the same columns",
        f"SnapKV with kernel 15 loses {of_2k['snapkv_kernel15'] - later['snapkv_kernel15']:.0f};",
    ]
    page = " ".join(tables["PAGE"].read_text(encoding="utf-8").split())
    assert [sentence for sentence in held if sentence not in page] == []
    losses = [loss(method, table) for method in ("oracle", "sparq", "rocketkv") for table in (of_2k, of_4k, of_8k)]
    assert max(map(abs, losses)) < 5, "the page says: within 5 points of Full"
