"""Draws each row's difference to Full with its interval, best first: a table's claim as one figure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from matplotlib.ticker import FuncFormatter, MaxNLocator

from evals.stats import ALPHA
from harness.reports.compare import Comparison, ReportRow
from harness.reports.pictures import figures
from harness.reports.pictures.figures import Drawn, Look
from harness.reports.pictures.lines import broken, named

FAINT = "#9a9ca3"
CAPTION = (
    "Difference to Full with its 95 % interval, best first; "
    "* holds after Holm's correction; hollow: p ≥ 0.05"
)


class Difference(NamedTuple):
    """A row's difference to Full, in points of score or, where texts were fed, in log-likelihood
    (nats per token), so that more is better in both."""

    mean: float
    ends: Sequence[float]
    p: float
    holds: bool  # after Holm's correction


def differences(tables: Sequence[Comparison], look: Look) -> Drawn | str:
    """Draw a panel for each table, with the same rows in all of them."""
    shown = [(table, rows) for table in tables if (rows := _by_name(table))]
    if not shown:
        return (
            "no run has a difference to Full with an interval: run Full on the same prompts, "
            "baseline=run, and enough of them"
        )
    names = list(dict.fromkeys(name for _, rows in shown for name in rows))
    names.sort(key=lambda name: fmean(rows[name].mean for _, rows in shown if name in rows))
    letters = max(len(line) for name in names for line in broken(name).splitlines())
    aside = letters * figures.LETTER * look.small / 72
    height = 1.6 * look.font / 72 * len(names)
    drawn = figures.panels(len(shown), look, 4.2, height, aside=aside, sharey=True)
    for axes, (table, rows) in zip(drawn.axes, shown, strict=True):
        axes.axvline(0, color=figures.SOFT, linewidth=0.8, zorder=1)
        for place, name in enumerate(names):
            if one := rows.get(name):
                apart = one.p < ALPHA
                colour = figures.INK if apart else FAINT
                axes.plot(one.ends, [place, place], color=colour, zorder=2)
                face = colour if apart else "white"
                axes.plot(one.mean, place, "o", color=colour, mfc=face, mew=1, zorder=3)
                if one.holds:
                    axes.annotate(
                        "*",
                        (one.ends[1], place),
                        (2, 0),
                        textcoords="offset points",
                        va="center_baseline",
                        fontsize=look.small,
                    )
        axes.set_yticks(range(len(names)), list(map(broken, names)))
        axes.set_ylim(-0.7, len(names) - 0.3)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda x, _: f"{x:+.3g}".replace("-", "−") if x else "0")
        )
        axes.grid(visible=False, axis="y")
        axes.spines[:].set_visible(False)
        axes.set_xlabel(
            drawn.fill("log-likelihood, nats per token" if table.of_perplexity else "points")
        )
        axes.set_title(drawn.fill(table.title))
    figures.lay_out(drawn, look)
    return Drawn(drawn.figure, CAPTION)


def _by_name(table: Comparison) -> dict[str, Difference]:
    return {
        named(entry): difference
        for entry in table.entries
        if (difference := _difference(entry, table))
    }


def _difference(entry: ReportRow, table: Comparison) -> Difference | None:
    """Return a row's difference to Full; None without an interval."""
    if table.of_perplexity:
        if not entry.cost.get("ci95"):
            return None
        low, high = entry.cost["ci95"]
        return Difference(-entry.cost["diff"], [-high, -low], entry.cost["p"], entry.cost_differs)
    full = entry.summary["full"]
    if not full or not full["ci95"]:
        return None
    ends = [100 * end for end in full["ci95"]]
    return Difference(100 * full["diff"], ends, full["p"], entry.score_differs)
