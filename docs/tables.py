"""`python docs/tables.py`: write the tables of docs/comparison.md again, from results/published/tables.

A table stands between `<!-- rows of NAME... -->`, which names the experiments whose CSV files it shows, and
`<!-- end -->`. All else in the page is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "comparison.md"
PUBLISHED = ROOT / "results" / "published" / "tables"
TABLE = re.compile(r"(<!-- rows of ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
GROUP = re.compile(r"score\.groups\.(.+)\.mean")
MIB = 1 / 2**20
COLUMNS = {  # of the CSV: heading, factor, format
    "budget.attended.share": ("attended (%)", 100, ".1f"),
    "budget.union.share": ("union (%)", 100, ".1f"),
    "score.averages.leading_digits_share": ("digits (%)", 100, ".1f"),
    "fidelity.recall": ("recall (%)", 100, ".1f"),
    "fidelity.mass": ("mass (%)", 100, ".1f"),
    "fidelity.kl": ("KL (nats)", 1, ".3f"),
    "memory.kv_device_bytes": ("KV device (MiB)", MIB, ".1f"),
    "memory.kv_host_bytes": ("KV host (MiB)", MIB, ".1f"),
    "memory.moved_bytes_per_step": ("moved (MiB/step)", MIB, ".1f"),
}


def written(page: str) -> str:
    """The page with tables of what the CSV files hold now."""
    return TABLE.sub(lambda found: f"{found[1]}\n{table(found[2].split())}\n{found[3]}", page)


def table(names: Sequence[str]) -> str:
    """Markdown: a row per method and budget, Full first, then the methods by their mean score."""
    rows = pd.concat([pd.read_csv(PUBLISHED / f"{name}.csv") for name in names], ignore_index=True)
    rows = _in_order(rows.drop_duplicates(["presets.method", "budget.asked"]).dropna(axis="columns", how="all"))
    columns = {
        "budget.asked": ("budget (%)", 100, "g"),
        **_scores(rows),
        **{column: how for column, how in COLUMNS.items() if column in rows},
    }
    lines = [["method", *(heading for heading, _, _ in columns.values())], [":--", *["--:"] * len(columns)]]
    for _, row in rows.iterrows():
        cells = (_cell(row[column], factor, form) for column, (_, factor, form) in columns.items())
        lines.append([row["presets.method"], *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Methods by what they score at the budgets that all of them have."""
    methods = rows.groupby("budget.asked")["presets.method"].nunique()
    shared = rows[rows["budget.asked"].isin(methods[methods == methods.max()].index)]
    means = shared.groupby("presets.method")["score.mean"].mean().sort_values(ascending=_perplexity(rows))
    places = {"full": -1} | {method: place for place, method in enumerate(means.index)}
    order = pd.DataFrame({"method": rows["presets.method"].map(places), "budget": rows["budget.asked"]})
    return rows.loc[order.sort_values(["method", "budget"]).index]


def _scores(rows: pd.DataFrame) -> dict[str, tuple[str, float, str]]:
    """A column per group of examples, and their mean."""
    found = [GROUP.fullmatch(column) for column in rows]
    groups = {one[0]: (one[1], *_unit(rows)) for one in found if one} if not _perplexity(rows) else {}
    return {**groups, "score.mean": ("perplexity" if _perplexity(rows) else "mean", *_unit(rows))}


def _unit(rows: pd.DataFrame) -> tuple[float, str]:
    return (1, ".2f") if _perplexity(rows) else (100, ".1f")


def _perplexity(rows: pd.DataFrame) -> bool:
    return bool(rows["task"].iloc[0] == "wikitext2")


def _cell(value: float, factor: float, form: str) -> str:
    return "" if pd.isna(value) else format(value * factor, form)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
