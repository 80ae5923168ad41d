"""`make tables`: fill the tables of README and docs/ and draw README's figure, from results/published.

A table stands between a marker and `<!-- end -->`; everything else on a page is written by hand.

- `<!-- rows of NAME... -->` shows every row of these CSV files; `<!-- rows of NAME...: METHOD... -->` shows Full and
  the named methods only, `<!-- rows of NAME... at 10 50 -->` the rows at these budgets (percent) and those without one.
- `<!-- headline of NAME -->` shows scores, likelihoods and bytes of NAME, reads of NAME_read and times of NAME_times,
  which have the same methods. NAME_floor has Full alone, in other arithmetic.
- `<!-- beside of NAME -->` shows differences to Full that papers print, and below each that of NAME, by
  results/paper/beside.csv.
- `<!-- families of NAME -->` shows which methods are refused on which families of models, and why, from
  results/published/NAME.csv, which `make families` writes.
- `<!-- engines of NAME -->` shows served models beside Full, from results/published/NAME.csv, which `make test-engines`
  writes.
- `<!-- decode of NAME... -->`, with `: METHOD...` or without, shows results of `bench decode`, `layer` or `generate`
  from results/published/bench/NAME.json. A row is marked if the code that it timed has changed since.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from evals.stats import ALPHA, holm
from harness.reports.columns import NOT_KEPT
from harness.reports.pictures import figures
from harness.results.files import unescaped
from harness.results.provenance import code_hash

ROOT = Path(__file__).parents[1]
BENCHES = ROOT / "results" / "published" / "bench"
PUBLISHED = ROOT / "results" / "published" / "tables"
PAPERS = ROOT / "results" / "paper"
PICTURE = ROOT / "docs" / "img" / "headline.png"
KINDS = "rows|headline|beside|families|engines|decode"
MARKED = re.compile(
    rf"(<!-- ({KINDS}) of ([\w/ ]+)(?:: ([\w ]+))? -->\n).*?(<!-- end -->)", re.DOTALL
)
MIB = 2**20
TIERS = ("device", "host", "disk")

NOTES = {
    (
        TOLD_APART := "\\*"
    ): "differs from Full after Holm's correction over all rows and measures of its file.",
    NOT_KEPT: "the row did not keep its budget.",
    (CHANGED := "‡"): "the code that was timed has changed since.",
    (UNSTAMPED := "§"): "measured before results remembered the code that they timed.",
}
DRAWN = ("qwen_ruler", "qwen_ruler_others")  # the tables of the figure, on the same prompts
BUDGET = 0.2  # of the headline tables
TUNED, PRESS, KIVI_2BIT = "_tuned", "press_", "kivi_2bit"
FAINT, DEVICE, HOST = "#b4b6bd", "#1f4e79", "#9ec3e6"

COLUMNS = {  # of the CSV: heading, factor, format
    "budget.attended.share": ("attended (%)", 100, ".1f"),
    "budget.union.share": ("union (%)", 100, ".1f"),
    "score.averages.leading_digits_share": ("digits (%)", 100, ".1f"),
    "fidelity.recall": ("recall (%)", 100, ".1f"),
    "fidelity.mass": ("mass (%)", 100, ".1f"),
    "fidelity.kl": ("KL (nats)", 1, ".3f"),
    "memory.kv_device_bytes": ("KV device (MiB)", 1 / MIB, ".1f"),
    "memory.kv_host_bytes": ("KV host (MiB)", 1 / MIB, ".1f"),
    "memory.moved_bytes_per_step": ("moved (MiB/step)", 1 / MIB, ".1f"),
}
BENCHED = {  # of the row of a benchmark: heading, factor
    "tpot_s": ("TPOT at {} (ms)", 1e3),
    "step_s": ("layer at {} (ms)", 1e3),
    "speedup": ("times as fast as Full at {}", 1),
    "device_bytes": ("KV at {} (MiB)", 1 / MIB),
    "ttft_s.ours": ("TTFT at {} (s)", 1),
    "ttft_s.ratio": ("of generate's TTFT at {}", 1),
    "tpot_s.ours": ("TPOT at {} (ms)", 1e3),
    "tpot_s.ratio": ("of generate's TPOT at {}", 1),
}
SERVED = {
    "full.diff": ("vs Full", 100, "+.0f"),
    "full.ci95.low": ("95 % from", 100, "+.0f"),
    "full.ci95.high": ("to", 100, "+.0f"),
    "ttft_s.p50": ("TTFT (s)", 1, ".1f"),
    "tpot_s.p50": ("TPOT (ms)", 1e3, ".0f"),
}
IN_ALL = {  # of budgets that are rows of prompt and answer, or of the answer
    "budget.total_tokens": ("read in all (rows)", 1, ".0f"),
    "memory.kv_device_bytes": COLUMNS["memory.kv_device_bytes"],
    "tpot_s.p50": ("TPOT (ms)", 1e3, ".0f"),
}
LIKELIHOODS = {
    "score.averages.perplexity": ("perplexity", 1, ".2f"),
    "likelihood.full.diff": ("NLL vs full (nats)", 1, "+.3f"),
    "likelihood.full.ci95.low": ("95 % from", 1, "+.3f"),
    "likelihood.full.ci95.high": ("to", 1, "+.3f"),
    "likelihood.full.p_holm": ("p (Holm)", 1, ".2g"),
}


def filled(page: str) -> str:
    """Return the Markdown page with every marked table made again from the published results."""

    def table(marker: re.Match[str]) -> str:
        head, kind, names, methods, end = marker.groups()
        chosen = (methods or "").split()
        whole = {"headline": headline, "beside": beside, "families": families, "engines": engines}
        if kind in whole:
            text = whole[kind](names)
        else:
            names, _, budgets = names.partition(" at ")
            files = names.split()
            text = (
                decode(files, chosen)
                if kind == "decode"
                else listing(files, chosen, budgets.split())
            )
        return f"{head}\n{text.rstrip()}\n\n{end}"

    return MARKED.sub(table, page)


def listing(names: Sequence[str], methods: Sequence[str] = (), budgets: Sequence[str] = ()) -> str:
    """Return a Markdown table from the CSV files of these names, with a row per method and budget:
    Full first, then the methods by their mean score. `methods`: presets to show beside Full;
    `budgets`: percents of the prompt to show. None means all."""
    rows = pd.concat(map(_read, names), ignore_index=True)
    if methods:
        rows = rows[rows["presets.method"].isin(["full", *methods])]
    if budgets:
        percents = (100 * rows["budget.asked"]).round()
        rows = rows[percents.isna() | percents.isin([*map(float, budgets)])]
    rows = rows.drop_duplicates(["label", "budget.asked"]).dropna(axis="columns", how="all").copy()
    variants = rows.groupby("presets.method")["label"].transform("nunique") > 1
    rows["method"] = rows["label"].where(variants, rows["presets.method"])
    named = [re.fullmatch(r"score\.groups\.(.+)\.mean", column) for column in rows]
    scores = {name[0]: (name[1], 100, ".1f") for name in named if name}
    if perplexity := "score.averages.perplexity" in rows:
        scores = LIKELIHOODS
    columns = {"budget.asked": ("budget (%)", 100, "g"), **scores}
    rows = _by_score(rows)
    cells = {"method": rows["method"]} | _cells(rows, columns)
    if not perplexity:
        cells["mean (95 % CI)"] = rows.apply(_score, axis="columns")
        if "likelihood.full.diff" in rows:
            cells["NLL vs full (nats, 95 % CI)"] = rows.apply(_nats, axis="columns")
    shares = not (rows["budget.asked"] > 1).any()
    measured = COLUMNS if shares else IN_ALL
    cells |= _cells(rows, {column: shown for column, shown in measured.items() if column in rows})
    if not shares:
        budgets = rows["budget.asked"].map(lambda x: f"{x:g}" if x > 1 else f"{100 * x:g} %")
        cells["budget (%)"] = budgets.where(rows["budget.asked"].notna(), "")
    if "budget.not_kept" in rows:
        cells["budget (%)"] += rows["budget.not_kept"].notna().map({True: NOT_KEPT, False: ""})
    shown = pd.DataFrame(cells)
    return _markdown(shown if shares else shown.rename(columns={"budget (%)": "budget"}), 1)


def _cells(
    rows: pd.DataFrame, columns: Mapping[str, tuple[str, float, str]]
) -> dict[str, pd.Series]:
    """Return the text of each of these columns under its heading; a missing value is an empty cell."""
    return {
        heading: rows[column].map(
            lambda x, k=factor, f=form: "" if pd.isna(x) else format(x * k, f)
        )
        for column, (heading, factor, form) in columns.items()
    }


def _read(name: str) -> pd.DataFrame:
    rows = pd.read_csv(PUBLISHED / f"{name}.csv").map(unescaped)
    if "full.p_holm" not in rows and "full.p" in rows:  # files of before reports corrected p-values
        known = rows["full.p"].dropna()
        rows["full.p_holm"] = pd.Series(holm(known.tolist()), known.index)
    return rows


def beside(name: str) -> str:
    """Return a Markdown table of differences to Full in points, task by task: what papers print, and
    below it what the published table of this name has of the same method."""
    ours = _read(name).set_index("presets.method")
    scores = 100 * ours.filter(regex=r"^score\.groups\..+\.mean$")
    scores.columns = scores.columns.str.extract(r"groups\.(\w+)", expand=False)
    pairs = pd.read_csv(PAPERS / "beside.csv").query("table == @name")
    printed = pd.read_csv(PAPERS / "paper_reference.csv")
    theirs = printed[printed["source"].isin(pairs["source"])].pivot(
        index=["source", "method", "model", "config"], columns="task", values="value"
    )
    lines = []
    for pair in pairs.itertuples():
        of_paper = (pair.source, pair.method, pair.model, pair.config)
        its_full = (pair.source, "full attention", pair.model, pair.full_config)
        own = f"{ours['model'][pair.preset]}, {100 * ours['budget.asked'][pair.preset]:g} %"
        losses = {
            f"{pair.model}, {pair.config}": theirs.loc[of_paper] - theirs.loc[its_full],
            own: scores.loc[pair.preset] - scores.loc["full"],
        }
        for setting, loss in losses.items():
            shown = loss.reindex(scores.columns).map("{:+.1f}".format, na_action="ignore")
            lines.append({"method": pair.preset, "setting": setting} | dict(shown.fillna("")))
    return _markdown(pd.DataFrame(lines), 2)


def families(name: str) -> str:
    """Return a Markdown table from the CSV file of this name: in one row the families of models on
    which the same methods are refused, for the same reasons; without methods made for a few of them."""
    cells = pd.read_csv(PUBLISHED.parent / f"{name}.csv", index_col="family").astype(str)
    cells = cells.loc[:, (cells == "runs").mean() > 0.1]
    alike: dict[str, list[str]] = {}
    for family, results in cells.iterrows():
        refused: dict[str, list[str]] = {}
        for method, reason in results.items():
            if reason != "runs":
                refused.setdefault(reason, []).append(str(method))
        said = "; ".join(
            f"{'all' if len(named) == len(results) else ', '.join(named)}: {reason}"
            for reason, named in refused.items()
        )
        alike.setdefault(said or "none", []).append(str(family))
    rows = [("; ".join(named), said) for said, named in alike.items()]
    return _markdown(pd.DataFrame(rows, columns=["families", "refused methods"]), 2)


def engines(name: str) -> str:
    """Return a Markdown table from the CSV file of this name: Full of our engine and of servers, task
    by task."""
    rows = pd.read_csv(PUBLISHED.parent / f"{name}.csv")
    words = {"task": rows["task"], "engine": rows["label"]}
    words["score (95 % CI)"] = rows.apply(_score, axis="columns")
    return _markdown(pd.DataFrame(words | _cells(rows, SERVED)), 2)


def decode(names: Sequence[str], methods: Sequence[str] = ()) -> str:
    """Return a Markdown table of times from the JSON files of these names. It has a row per method,
    or per dtype, in the order of the first file; what a later file lacks is an empty cell there.
    Rows whose code is gone are left out."""
    table: dict[str, dict[str, str]] = {}
    for name in names:
        for row in json.loads((BENCHES / f"{name}.json").read_text(encoding="utf-8"))["rows"]:
            timed = row.get("code", {})
            today = {module: code_hash(module) for module in timed}
            head = "method" if "method" in row else "dtype"
            what = row.get(head, "").partition(":")[0]
            if "error" in row or None in today.values() or (methods and what not in methods):
                continue
            mark = CHANGED * (today != timed) if timed else UNSTAMPED
            cells = table.setdefault(what, {head: what})
            cells[head] += mark * (mark not in cells[head])
            figures = pd.json_normalize(row).to_dict("records")[0]
            for key, (heading, factor) in BENCHED.items():
                if key in figures:
                    at = heading.format(row.get("tokens", row.get("prompt_tokens")))
                    cells[at] = _estimate(figures[key], factor) if figures[key] else ""
    return _markdown(pd.DataFrame(table.values()).fillna(""), 1)


def _estimate(values: float | Sequence[float], factor: float) -> str:
    """Return a median and its interval as text, three digits each, or a number without digits after
    its point; `values` are the median and the interval's ends, and `factor` converts their unit."""
    if not isinstance(values, Sequence):
        return f"{factor * values:.0f}"
    middle, low, high = (f"{factor * value:#.3g}" for value in values)
    return f"{middle} ({low}-{high})"


def _by_score(rows: pd.DataFrame) -> pd.DataFrame:
    """Sort the rows of a table by method and budget: Full first, then the methods by their mean
    score at those budgets that most methods have."""
    methods = rows.groupby("budget.asked")["method"].nunique()
    shared = rows[rows["budget.asked"].isin(methods[methods == methods.max()].index)]
    means = shared.groupby("method")["score.mean"].mean().sort_values(ascending=False)
    places = {"full": -1} | {method: place for place, method in enumerate(means.index)}
    order = pd.DataFrame({"method": rows["method"].map(places), "budget": rows["budget.asked"]})
    return rows.loc[order.sort_values(["method", "budget"]).index]


def _markdown(cells: pd.DataFrame, words: int) -> str:
    """Return a Markdown table; its first `words` columns are words, the others numbers."""
    sides = [":--"] * words + ["--:"] * (len(cells.columns) - words)
    lines = [list(cells), sides, *cells.to_numpy().tolist()]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text + "".join(f"\n{mark}: {note}\n" for mark, note in NOTES.items() if mark in text)


def headline_rows(*names: str) -> pd.DataFrame:
    """Return the rows of published CSV files at the headline's budget: Full first, then each
    method by its best score, its authors' setting before the tuned one. `method` is the preset's
    name without `_tuned`; `device`, `host`, `disk`, `held` (their sum) and `moved` are MiB."""
    rows = pd.concat(map(_read, names)).drop_duplicates(["presets.method", "budget.asked"])
    budgets = rows["budget.asked"]
    rows = rows[budgets.isna() | (budgets == BUDGET)].copy()
    rows["module"] = rows["method"]
    rows["preset"] = rows["presets.method"]
    rows["tuned"] = rows["preset"].str.endswith(TUNED)
    rows["method"] = rows["preset"].str.removesuffix(TUNED)
    for tier in TIERS:
        rows[tier] = rows[f"memory.kv_{tier}_bytes"].fillna(0) / MIB
    rows["held"] = rows[list(TIERS)].sum(axis="columns")
    rows["moved"] = rows["memory.moved_bytes_per_step"] / MIB
    rows["best"] = rows.groupby("method")["score.mean"].transform("max")
    rows["is_full"] = rows["method"] == "full"
    order = rows.sort_values(
        ["is_full", "best", "method", "tuned"], ascending=[False, False, True, True]
    )
    return order.set_index("preset", drop=False)


def headline(name: str) -> str:
    """Return the Markdown table of a headline experiment (all methods at one budget, with scores,
    bytes and times), and below it the number of prompts and the noise floor."""
    rows = headline_rows(name)
    read, times = (headline_rows(f"{name}_{what}").loc[rows.index] for what in ("read", "times"))
    cells = {
        "method": rows["method"],
        "setting": rows.apply(_setting, axis="columns"),
        "score (95 % CI)": rows.apply(_score, axis="columns"),
        "NLL vs full (nats, 95 % CI)": rows.apply(_nats, axis="columns"),
        "attended (%)": 100 * rows["budget.attended.share"],
        **{f"{tier} (MiB)": rows[tier] for tier in TIERS[:2]},
        "both (MiB)": rows["held"],
        "moved (MiB/step)": rows["moved"],
        "read (MiB/step)": read["memory.read_bytes_per_step"] / MIB,
        # includes sealing wherever rows lie, as TTFT does not
        "TT2T (ms)": 1000 * times["tt2t_s.p50"],
        "TPOT (ms)": 1000 * times["tpot_s.p50"],
    }
    for heading in list(cells)[4:]:
        cells[heading] = cells[heading].map(lambda value: "" if pd.isna(value) else f"{value:.1f}")
    if "budget.not_kept" in rows:
        cells["attended (%)"] += rows["budget.not_kept"].notna().map({True: NOT_KEPT, False: ""})
    sources = {"": rows, "`read`: ": read, "TT2T and TPOT: ": times}
    prompts = "; ".join(f"{what}{_prompts(table, name)}" for what, table in sources.items())
    full = pd.concat([headline_rows(f"{name}_floor"), rows.loc[["full"]]])
    score, nats = (np.ptp(full[column]) for column in ("score.mean", "likelihood.mean"))
    dtypes = " and ".join(sorted(full["dtype"].unique()))
    batches = " and ".join(map(str, sorted(full["batch"].unique())))
    return (
        f"{_markdown(pd.DataFrame(cells), 2)}\n"
        f"{prompts}.\n\n"
        f"[Noise floor](../results/published/tables/{name}_floor.csv): the means of Full over these prompts, above "
        f"and in {dtypes} with batches of {batches}, differ by at most {100 * score:.1f} points and {nats:.4f} "
        "nats per token.\n\n"
    )


def _setting(row: pd.Series) -> str:
    if row["is_full"]:
        return ""
    return "tuned" if row["tuned"] else "kvpress" if row["method"].startswith(PRESS) else "authors'"


def _score(row: pd.Series) -> str:
    ends = f"{100 * row['score.ci95.low']:.0f}, {100 * row['score.ci95.high']:.0f}"
    return f"{100 * row['score.mean']:.1f} [{ends}]{_star(row['full.p_holm'])}"


def _nats(row: pd.Series) -> str:
    ends = [
        row["likelihood.full.diff"],
        row["likelihood.full.ci95.low"],
        row["likelihood.full.ci95.high"],
    ]
    if pd.isna(ends[0]):
        return ""
    # a sign stands before a digit
    diff, low, high = (f"{end:+.{3 if abs(end) >= 0.0005 else 4}f}" for end in ends)
    return f"{diff} [{low}, {high}]{_star(row['likelihood.full.p_holm'])}"


def _star(p: float) -> str:
    return TOLD_APART if p < ALPHA else ""


def _prompts(rows: pd.DataFrame, name: str) -> str:
    sizes = sorted(set(rows["num_examples"].tolist()))
    if len(sizes) > 1:
        raise ValueError(
            f"{name}: rows have {sizes} prompts: publish it when all have the same number."
        )
    return f"{sizes[0]} prompts (median {rows['prompt_tokens.median'].median():.0f} tokens)"


def figure(names: Sequence[str]) -> Figure:
    """Draw README's figure of these published tables, with a line per method, best first: its score,
    how much likelihood it loses, what it holds, and what it moves.

    Dark marks are tuned settings, or the only one; faint ones are the authors'. Methods of kvpress
    ("presses") stand in the table alone."""
    rows = headline_rows(*names)
    full = rows[rows["is_full"]].iloc[0]
    shown = rows[
        ~rows["is_full"] & ((rows["method"] == rows["module"]) | (rows["method"] == KIVI_2BIT))
    ]
    methods = list(dict.fromkeys(shown["method"]))[::-1]
    widths = [3.2, 2.6, 3.2, 2.6]
    drawn = Figure(figsize=(1.5 + sum(widths), 1.5 + 0.27 * len(methods)))
    panels = list(drawn.subplots(1, len(widths), sharey=True, width_ratios=widths))
    pairs = [shown[shown["method"] == method].sort_values("tuned") for method in methods]
    _points(panels[0], pairs, "score.mean", "score.ci95", 100)
    _reference(panels[0], 100 * full["score.mean"])
    panels[0].set_xlabel("score (0-100), 95 % interval")
    _points(panels[1], pairs, "likelihood.full.diff", "likelihood.full.ci95", 1)
    panels[1].set_xscale("symlog", linthresh=0.01)
    panels[1].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    _reference(panels[1], 0.0)
    panels[1].set_xlabel("right answer costs more (nats per token)")
    _bars(panels[-2], pairs, TIERS[:2])
    _reference(panels[-2], full["held"])
    panels[-2].set_xlabel("keys, values and index held (MiB)")
    _bars(panels[-1], pairs, ["moved"])
    panels[-1].set_xlabel("moved between them per step (MiB)")
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].set_ylim(-0.6, len(methods) - 0.4)
    for axes in panels:
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
    prompts = f"{full['num_examples']} prompts of RULER, {full['prompt_tokens.median']:.0f} tokens in the median"
    dark = "dark: tuned on other prompts, or its only setting; faint: as the authors have it; dashed: Full"
    legend = dark if shown["tuned"].any() else "parameters as the authors have them; dashed: Full"
    model = str(full["model"]).rpartition("/")[2]
    figures.title(drawn, f"{model}, {prompts}, budget of a fifth", legend)
    return drawn


def _points(axes: Axes, pairs: Sequence[pd.DataFrame], key: str, ends: str, factor: int) -> None:
    """Draw a point per method, with its interval; a faint one where the authors' setting has another."""
    for place, pair in enumerate(pairs):
        values = factor * pair[[key, f"{ends}.low", f"{ends}.high"]]
        first, best = values[key].iloc[0], values[key].iloc[-1]
        if len(pair) > 1:
            axes.plot([first, best], [place] * 2, color=FAINT, linewidth=1, zorder=1)
            axes.plot(first, place, "o", color=FAINT, markersize=5, zorder=2)
        span = values.iloc[-1, 1:]
        axes.plot(span, [place] * 2, color=DEVICE, linewidth=1.4, alpha=0.45, zorder=2)
        axes.plot(best, place, "o", color=DEVICE, markersize=6, zorder=3)


def _bars(axes: Axes, pairs: Sequence[pd.DataFrame], keys: Sequence[str]) -> None:
    """Draw one bar per method, stacked over `keys`; a tick marks the authors' setting where it holds something else."""
    for place, pair in enumerate(pairs):
        left = 0.0
        for key, colour in zip(keys, (DEVICE, HOST), strict=False):
            size, label = pair.iloc[-1][key], "" if place else f"on the {key}"
            axes.barh(place, size, 0.55, left=left, color=colour, label=label, zorder=2)
            left += size
        authors = pair.iloc[0][list(keys)].sum()
        if abs(authors - left) > 0.01 * max(left, 1):
            axes.plot(
                [authors] * 2,
                [place - 0.35, place + 0.35],
                color=figures.SOFT,
                linewidth=1.5,
                zorder=3,
            )
    if len(keys) > 1:
        axes.legend(loc="lower right", frameon=True, framealpha=1, edgecolor="white")


def _reference(axes: Axes, x: float) -> None:
    axes.axvline(x, color=figures.INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)


if __name__ == "__main__":
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if (today := filled(text)) != text:
            path.write_text(today, encoding="utf-8")
    with figures.styled(figures.Look(font=10)):
        PICTURE.write_bytes(figures.png(figure(DRAWN)))
