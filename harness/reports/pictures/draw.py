"""All pictures of a report: differences to Full, score against cost, cost along answers, heat maps of needles."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from evals.stats import ALPHA
from harness.reports.compare import Comparison, ReportRow
from harness.reports.pictures import figures
from harness.reports.pictures.along import along, has_along
from harness.reports.pictures.frontier import frontier, has_frontier
from harness.reports.pictures.heatmap import (
    NeedleScore,
    are_flat,
    grid,
    heatmap,
    heatmap_by_run,
    needles_by_task,
)

LONGEST = 120  # characters of a table's or run's part in the name of a picture
FAINT = "#9a9ca3"


def draw(tables: Sequence[Comparison], folder: Path) -> Iterator[Path]:
    """Write every picture of these tables into a folder, and yield the files. Names begin with
    numbers, so that they differ even if the rest is cut."""
    folder.mkdir(exist_ok=True)
    for number, table in enumerate(tables, 1):
        for subject, kind, figure in pictures(table):
            yield from figures.save(
                figure, folder / f"{slug(f'{number}-{subject}')[:LONGEST]}-{slug(kind)}.png"
            )


def slug(text: str) -> str:
    text = re.sub(r"[][(){}'\"]", "", text)  # lengths=[512] is lengths=512, not lengths=-512
    return re.sub(r"[^A-Za-z0-9.=]+", "-", text).strip("-")


def pictures(table: Comparison) -> Iterator[tuple[str, str, Figure]]:
    """Yield (title, kind, figure) for each picture of a table; the title is the table's or a
    run's. A picture shows at most `figures.MOST` rows, and says which if there are more."""
    first = table
    if len(table.entries) > figures.MOST:
        title = f"{table.title} (the first {figures.MOST} of {len(table.entries)} rows)"
        first = replace(table, title=title, entries=table.entries[: figures.MOST])
    if any(_difference(entry, table) for entry in table.entries):
        yield table.title, "differences", differences(table)
    if has_frontier(table):
        yield table.title, "frontier", frontier(table)
    if has_along(first):
        yield table.title, "along", along(first)
    tasks: dict[str, dict[str, list[NeedleScore]]] = defaultdict(dict)
    for entry in first.entries:
        for task, needles in needles_by_task(entry.run.records).items():
            tasks[task][named(entry)] = needles
    for task, by_run in tasks.items():
        grids = {run: grid(needles) for run, needles in by_run.items()}
        if are_flat(list(grids.values())):
            yield table.title, f"{task}-heatmap", heatmap_by_run(grids, f"{task}: {first.title}")
        else:
            for place, (run, needles) in enumerate(by_run.items(), 1):
                yield (
                    f"{place}-{run}",
                    f"{task}-heatmap",
                    heatmap(needles, f"{run}, {task}: {first.title}"),
                )


def named(entry: ReportRow) -> str:
    """Return the name of a row in a picture; "(incomplete)" marks a run that is not finished."""
    return entry.title + " (incomplete)" * (entry.summary["status"] != "complete")


def differences(table: Comparison) -> Figure:
    """Draw each row's difference to Full with its interval, best first: the table's claim as one figure."""
    rows = [(*shown, entry) for entry in table.entries if (shown := _difference(entry, table))]
    rows.sort(key=lambda row: row[0])
    best = f", the best {figures.MOST} of {len(rows)} rows" * (len(rows) > figures.MOST)
    rows = rows[-figures.MOST :]
    names = [
        named(entry) + " *" * (entry.score_differs or (entry.cost_differs and table.of_perplexity))
        for *_, entry in rows
    ]
    size = (5.8 + 0.085 * max(map(len, names)), 1.3 + 0.21 * len(names))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color=figures.SOFT, linewidth=0.8, zorder=1)
    for place, (difference, ends, p, _) in enumerate(rows):
        colour, face = (FAINT, "white") if p >= ALPHA else (figures.INK, figures.INK)
        axes.plot(ends, [place, place], color=colour, linewidth=1.3, zorder=2)
        axes.plot(
            difference, place, "o", markersize=5, color=colour, markerfacecolor=face, zorder=3
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.set_xlabel("log-likelihood, nats per token" if table.of_perplexity else "points")
    factor, places = (1, 2) if table.of_perplexity else (100, 0)
    axes.xaxis.set_major_formatter(
        FuncFormatter(
            lambda x, _: (
                f"{factor * x:+.{places}f}".replace("-", "−") if round(factor * x, places) else "0"
            )
        )
    )
    axes.grid(axis="x", color=figures.GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    figures.plain(axes)
    legend = "with its 95 % interval; * holds after Holm's correction; hollow: p ≥ 0.05"
    figures.title(
        figure, table.title, *figures.wrapped(figure, f"difference to Full{best}, {legend}")
    )
    return figure


def _difference(entry: ReportRow, table: Comparison) -> tuple[float, list[float], float] | None:
    """Return a row's difference to Full, its interval and p; None without an interval. It is in
    score, or, if texts were fed, in log-likelihood (nats per token), so that more is better in
    both."""
    if not table.of_perplexity:
        full = entry.summary["full"]
        return (full["diff"], full["ci95"], full["p"]) if full and full["ci95"] else None
    if not entry.cost.get("ci95"):
        return None
    low, high = entry.cost["ci95"]
    return -entry.cost["diff"], [-high, -low], entry.cost["p"]
