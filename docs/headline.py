"""`python docs/headline.py`: draw the figure of README, and write the headline tables of docs/comparison.md, from
results/published/tables.

A headline table stands between `<!-- headline of NAME -->` and `<!-- end -->`. Its rows come from up to three
experiments with the same methods: NAME has scores, likelihoods and bytes, NAME_read what a traced step reads, and
NAME_times what an idle machine takes. What nobody has measured yet has no column, and a sentence below says so.
NAME_floor has Full alone, in other arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from evals.stats import ALPHA
from harness.reports.pictures import figures

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "comparison.md"
PICTURE = ROOT / "docs" / "img" / "headline.png"
PUBLISHED = ROOT / "results" / "published" / "tables"
DRAWN = "headline_2k"  # the table of the figure
BUDGET = 0.2
TABLE = re.compile(r"(<!-- headline of (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
CONCLUSION = re.compile(r"^- ((?:Of \d+ pairs of rows|If examples go on|Too many pairs).*)$", re.MULTILINE)
TUNED, PRESS, KIVI_2BIT = "_tuned", "press_", "kivi_2bit"
MIB = 2**20
TIERS = ("device", "host", "disk")
FAINT, DEVICE, HOST = "#b4b6bd", "#1f4e79", "#9ec3e6"
UNMEASURED = {
    "read": "bytes read per step",
    "times": "times, which need runs of their own on a machine with nothing else to do",
}


def rows(name: str) -> pd.DataFrame:
    """The rows of a table at the headline's budget, Full first, then each method by its best score, its authors'
    setting before the tuned one. `method` has no suffix; `tuned` says which of the two a row is; bytes are in MiB."""
    found = pd.read_csv(PUBLISHED / f"{name}.csv")
    found = found[found["budget.asked"].isna() | (found["budget.asked"] == BUDGET)].copy()
    found["module"], found["typed"] = found["method"], found["presets.method"]
    found["tuned"] = found["typed"].str.endswith(TUNED)
    found["method"] = found["typed"].str.removesuffix(TUNED)
    for tier in TIERS:
        found[tier] = found[f"memory.kv_{tier}_bytes"].fillna(0) / MIB
    found["held"] = found[list(TIERS)].sum(axis="columns")
    found["moved"] = found["memory.moved_bytes_per_step"] / MIB
    found["best"] = found.groupby("method")["score.mean"].transform("max")
    found["is_full"] = found["method"] == "full"
    found = found.sort_values(["is_full", "best", "method", "tuned"], ascending=[False, False, True, True])
    return found.set_index("typed", drop=False)


def written(page: str) -> str:
    """The page with the headline tables of what the CSV files hold now."""
    return TABLE.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", page)


def table(name: str) -> str:
    """Markdown: a row for each method and setting, and below it what can be concluded and what is not measured."""
    found = rows(name)
    read, times = _joined(found, f"{name}_read"), _joined(found, f"{name}_times")
    cells = {
        "method": found["method"],
        "setting": [_setting(row) for _, row in found.iterrows()],
        "score (95 % CI)": [_score(row) for _, row in found.iterrows()],
        "NLL vs full (nats, 95 % CI)": [_nats(row) for _, row in found.iterrows()],
        "attended (%)": _number(100 * found["budget.attended.share"]),
        **{f"{tier} (MiB)": _number(found[tier]) for tier in TIERS[:2]},
        "both (MiB)": _number(found["held"]),
        "moved (MiB/step)": _number(found["moved"]),
    }
    if read is not None:
        cells["read (MiB/step)"] = _number(read["memory.read_bytes_per_step"] / MIB)
    if times is not None:
        cells["TT2T (ms)"] = _number(1000 * times["tt2t_s.p50"])  # holds the seal wherever rows lie, as TTFT does not
        cells["TPOT (ms)"] = _number(1000 * times["tpot_s.p50"])
    lines = [list(cells), [":--", ":--", *["--:"] * (len(cells) - 2)], *zip(*cells.values(), strict=True)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return "\n".join([text, *_below(name, found, {"read": read, "times": times}), ""])


def _joined(found: pd.DataFrame, name: str) -> pd.DataFrame | None:
    """The rows of another table in the order of `found`; None where it lacks one of them."""
    if not (PUBLISHED / f"{name}.csv").exists():
        return None
    other = rows(name)
    return other.loc[found.index] if found.index.isin(other.index).all() else None


def _below(name: str, found: pd.DataFrame, measured: dict[str, pd.DataFrame | None]) -> Iterator[str]:
    measured_on = {"": found, "`read`: ": measured["read"], "TT2T and TPOT: ": measured["times"]}
    prompts = "; ".join(f"{columns}{_prompts(of, name)}" for columns, of in measured_on.items() if of is not None)
    yield f"{prompts}. \\*: differs from Full after Holm's correction over both measures and all rows.\n"
    yield from (f"{said}\n" for said in CONCLUSION.findall((PUBLISHED / f"{name}.md").read_text(encoding="utf-8")))
    if (PUBLISHED / f"{name}_floor.csv").exists():
        yield f"{_floor(name)}\n"
    if lacking := [UNMEASURED[what] for what, other in measured.items() if other is None]:
        yield f"Not measured yet: {'; '.join(lacking)}.\n"


def _floor(name: str) -> str:
    """By how much Full differs from itself on the same prompts, that of the table among them, where nothing but the
    arithmetic changes."""
    full = pd.concat([rows(f"{name}_floor"), rows(name).loc[["full"]]])
    score, nats = (full[column].max() - full[column].min() for column in ("score.mean", "likelihood.mean"))
    dtypes, batches = (" and ".join(map(str, sorted(full[column].unique()))) for column in ("dtype", "batch"))
    return (
        f"[Noise floor](../results/published/tables/{name}_floor.md): the means of Full over these prompts, above and "
        f"in {dtypes} with batches of {batches}, differ by at most {100 * score:.1f} points and {nats:.4f} nats per "
        "token."
    )


def _prompts(found: pd.DataFrame, name: str) -> str:
    """How many prompts each row has, and how long they are."""
    sizes = sorted(set(found["num_examples"].tolist()))
    if len(sizes) > 1:
        raise ValueError(f"{name}: rows have {sizes} prompts: publish it when all have the same number.")
    return f"{sizes[0]} prompts (median {found['prompt_tokens.median'].median():.0f} tokens)"


def _setting(row: pd.Series) -> str:
    if row["is_full"]:
        return ""
    return "tuned" if row["tuned"] else "kvpress" if row["method"].startswith(PRESS) else "authors'"


def _score(row: pd.Series) -> str:
    ends = f"{100 * row['score.ci95.low']:.0f}, {100 * row['score.ci95.high']:.0f}"
    return f"{100 * row['score.mean']:.1f} [{ends}]{_star(row['full.p_holm'])}"


def _nats(row: pd.Series) -> str:
    ends = [row["likelihood.full.diff"], row["likelihood.full.ci95.low"], row["likelihood.full.ci95.high"]]
    if pd.isna(ends[0]):
        return ""
    diff, low, high = (f"{end:+.{3 if abs(end) >= 0.0005 else 4}f}" for end in ends)  # a sign stands before a digit
    return f"{diff} [{low}, {high}]{_star(row['likelihood.full.p_holm'])}"


def _star(p: float) -> str:
    return "\\*" if p < ALPHA else ""


def _number(values: pd.Series) -> list[str]:
    return ["" if pd.isna(value) else f"{value:.1f}" for value in values]


def figure(name: str) -> Figure:
    """A line for each method, best first: its score, what its likelihood loses, what it holds, what it moves. Dark:
    tuned, or the only setting there is; faint: as its authors have it. Presses stand in the table alone."""
    found = rows(name)
    full = found[found["is_full"]].iloc[0]
    shown = found[~found["is_full"] & ((found["method"] == found["module"]) | (found["method"] == KIVI_2BIT))]
    methods = list(dict.fromkeys(shown["method"]))[::-1]
    has_nats = "likelihood.full.diff" in shown and shown["likelihood.full.diff"].notna().any()
    widths = [3.2, 2.6, 3.2, 2.6] if has_nats else [3.2, 3.2, 2.6]
    drawn = Figure(figsize=(1.5 + sum(widths), 1.5 + 0.27 * len(methods)), layout="constrained")
    panels = list(drawn.subplots(1, len(widths), sharey=True, width_ratios=widths))
    _points(panels[0], shown, methods, "score.mean", "score.ci95", 100)
    _reference(panels[0], 100 * full["score.mean"])
    panels[0].set_xlabel("score (0-100), 95 % interval")
    if has_nats:
        _points(panels[1], shown, methods, "likelihood.full.diff", "likelihood.full.ci95", 1)
        panels[1].set_xscale("symlog", linthresh=0.01)
        panels[1].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        _reference(panels[1], 0.0)
        panels[1].set_xlabel("right answer costs more (nats per token)")
    _bars(panels[-2], shown, methods, TIERS[:2])
    _reference(panels[-2], full["held"])
    panels[-2].set_xlabel("keys, values and index held (MiB)")
    _bars(panels[-1], shown, methods, ["moved"])
    panels[-1].set_xlabel("moved between them per step (MiB)")
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].set_ylim(-0.6, len(methods) - 0.4)
    for axes in panels:
        figures.framed(axes, grid="x")
        axes.spines["left"].set_visible(False)
    _title(drawn, shown, full)
    return drawn


def _title(drawn: Figure, shown: pd.DataFrame, full: pd.Series) -> None:
    about = f"{full['num_examples']} prompts of RULER, {full['prompt_tokens.median']:.0f} tokens in the median"
    dark = "dark: tuned on other prompts, or its only setting; faint: as the authors have it; dashed: Full"
    legend = dark if shown["tuned"].any() else "parameters as the authors have them; dashed: Full"
    figures.title(drawn, f"{str(full['model']).rpartition('/')[2]}, {about}, budget of a fifth", legend)


def _points(axes: Axes, shown: pd.DataFrame, methods: list[str], key: str, ends: str, factor: int) -> None:
    for place, method in enumerate(methods):
        pair = shown[shown["method"] == method].sort_values("tuned")
        best = pair.iloc[-1]
        if len(pair) > 1:
            first = pair.iloc[0]
            axes.plot([factor * first[key], factor * best[key]], [place] * 2, color=FAINT, linewidth=1, zorder=1)
            axes.plot(factor * first[key], place, "o", color=FAINT, markersize=5, zorder=2)
        span = [factor * best[f"{ends}.low"], factor * best[f"{ends}.high"]]
        axes.plot(span, [place] * 2, color=DEVICE, linewidth=1.4, alpha=0.45, zorder=2)
        axes.plot(factor * best[key], place, "o", color=DEVICE, markersize=6, zorder=3)


def _bars(axes: Axes, shown: pd.DataFrame, methods: list[str], keys: list[str]) -> None:
    """One bar for each method; where two keys are stacked, the legend names them. A tick: the authors' setting."""
    for place, method in enumerate(methods):
        pair = shown[shown["method"] == method].sort_values("tuned")
        left = 0.0
        for key, colour in zip(keys, (DEVICE, HOST), strict=False):
            size, label = pair.iloc[-1][key], "" if place else f"on the {key}"
            axes.barh(place, size, 0.55, left=left, color=colour, label=label, zorder=2)
            left += size
        before = pair.iloc[0][list(keys)].sum()
        if abs(before - left) > 0.01 * max(left, 1):
            axes.plot([before] * 2, [place - 0.35, place + 0.35], color=figures.SOFT, linewidth=1.5, zorder=3)
    if len(keys) > 1:
        axes.legend(loc="lower right", framealpha=1, edgecolor="white", fontsize=8.5)


def _reference(axes: Axes, x: float) -> None:
    axes.axvline(x, color=figures.INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    figures.save(figure(DRAWN), PICTURE)
    PICTURE.with_suffix(".pdf").unlink()  # pages show the PNG alone
