"""`python docs/tables.py`: write the tables of docs/comparison.md again, from results/published/tables.

A table stands between `<!-- rows of NAME... -->`, which names the experiments whose CSV files it shows, and
`<!-- end -->`; `<!-- rows of NAME...: METHOD... -->` shows Full and these methods alone. All else in the page is
written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "comparison.md"
PUBLISHED = ROOT / "results" / "published" / "tables"
TABLE = re.compile(r"(<!-- rows of ([\w ]+)(?:: ([\w ]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
GROUP = re.compile(r"score\.groups\.(.+)\.mean")
PERPLEXITY = "score.averages.perplexity"
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
    return TABLE.sub(lambda found: f"{found[1]}\n{table(found[2].split(), (found[3] or '').split())}\n{found[4]}", page)


def table(names: Sequence[str], methods: Sequence[str] = ()) -> str:
    """Markdown: a row per method and budget, Full first, then the methods by their mean score; all, or `methods`."""
    rows = pd.concat([pd.read_csv(PUBLISHED / f"{name}.csv") for name in names], ignore_index=True)
    if methods:
        rows = rows[rows["presets.method"].isin(["full", *methods])]
    rows = rows.drop_duplicates(["label", "budget.asked"]).dropna(axis="columns", how="all").copy()
    rows = _in_order(rows.assign(name=_names(rows)))
    columns = {
        "budget.asked": ("budget (%)", 100, "g"),
        **_scores(rows),
        **{column: how for column, how in COLUMNS.items() if column in rows},
    }
    lines = [["method", *(heading for heading, _, _ in columns.values())], [":--", *["--:"] * len(columns)]]
    for _, row in rows.iterrows():
        cells = (_cell(row[column], factor, form) for column, (_, factor, form) in columns.items())
        lines.append([row["name"], *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _names(rows: pd.DataFrame) -> pd.Series[str]:
    """The method, with its parameters where the table has several variants of it."""
    variants = rows.groupby(["presets.method", "budget.asked"], dropna=False)["label"].transform("size") > 1
    return rows["label"].where(variants, rows["presets.method"])


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Methods by what they score at the budgets that all of them have."""
    methods = rows.groupby("budget.asked")["name"].nunique()
    shared = rows[rows["budget.asked"].isin(methods[methods == methods.max()].index)]
    means = shared.groupby("name")["score.mean"].mean().sort_values(ascending=False)
    places = {"full": -1} | {method: place for place, method in enumerate(means.index)}
    order = pd.DataFrame({"method": rows["name"].map(places), "budget": rows["budget.asked"]})
    return rows.loc[order.sort_values(["method", "budget"]).index]


def _scores(rows: pd.DataFrame) -> dict[str, tuple[str, float, str]]:
    """Perplexity and what a token costs above Full; or a column per group of examples, and their mean."""
    if PERPLEXITY in rows:
        return {
            PERPLEXITY: ("perplexity", 1, ".2f"),
            "likelihood.full.diff": ("NLL vs full (nats)", 1, "+.3f"),
            "likelihood.full.ci95.low": ("95 % from", 1, "+.3f"),
            "likelihood.full.ci95.high": ("to", 1, "+.3f"),
            "likelihood.full.p_holm": ("p (Holm)", 1, ".2g"),
        }
    groups = [found for column in rows if (found := GROUP.fullmatch(column))]
    return {**{group[0]: (group[1], 100, ".1f") for group in groups}, "score.mean": ("mean", 100, ".1f")}


def _cell(value: float, factor: float, form: str) -> str:
    return "" if pd.isna(value) else format(value * factor, form)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
