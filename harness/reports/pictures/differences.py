"""Each row's difference to Full with its interval, best first: the table's claim as one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from evals.stats import ALPHA
from harness.reports.compare import Comparison
from harness.reports.pictures import figures

FAINT = "#9a9ca3"
POINTS = ("points", 100, 0)  # name of the axis, its units of a difference, decimals
NATS = ("log-likelihood, nats per token", 1, 2)
LEGEND = "with its 95 % interval; * holds after Holm's correction; hollow: p ≥ 0.05"


def differences(table: Comparison, path: Path, title: str) -> tuple[Path, Path]:
    """Draw the differences of the rows that are compared with Full; return the files."""
    found = [(beside, entry) for entry in table.entries if (beside := table.beside(entry))]
    found.sort(key=lambda pair: pair[0]["diff"])
    rows = [entry for _, entry in found]
    marked = table.significant_costs if table.of_perplexity else table.significant
    significant = {table.entries[i].title for i in marked}
    longest = max(len(entry.title) for entry in rows)
    figure = Figure(figsize=(5.8 + 0.085 * longest, 1.3 + 0.21 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color=figures.SOFT, linewidth=0.8, zorder=1)
    for place, (beside, _) in enumerate(found):
        _row(axes, place, beside, beside["p"] >= ALPHA)
    names = [entry.title + entry.unfinished + " *" * (entry.title in significant) for entry in rows]
    _finish(axes, names, *(NATS if table.of_perplexity else POINTS))
    figures.title(figure, title, *figures.wrapped(figure, f"difference to Full, {LEGEND}"))
    return figures.save(figure, path)


def _row(axes: Axes, place: int, beside: Mapping[str, Any], grey: bool) -> None:
    colour = FAINT if grey else figures.INK
    axes.plot(beside["ci95"], [place, place], color=colour, linewidth=1.3, zorder=2)
    face = "white" if grey else colour
    axes.plot(beside["diff"], place, "o", markersize=5, color=colour, markerfacecolor=face, zorder=3)


def _finish(axes: Axes, names: Sequence[str], unit: str, factor: int, places: int) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{factor * x:+.{places}f}".replace("-", "−") if round(factor * x, places) else "0")
    )
    axes.grid(axis="x", color=figures.GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    figures.plain(axes)
