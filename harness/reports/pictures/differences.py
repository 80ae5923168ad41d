"""Each row's difference to Full with its interval, best first: the table's claim as one figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from harness.reports import noise
from harness.reports.compare import Comparison, ReportRow
from harness.reports.pictures import figures

FAINT = "#9a9ca3"
LEGEND = (
    "with its 95 % interval; * holds after Holm's correction; hollow: within the noise (p ≥ 0.05, or below its floor)"
)


def differences(table: Comparison, path: Path, title: str) -> tuple[Path, Path]:
    """Of the rows that are held against Full. The files drawn."""
    rows = sorted((table.entries[i] for i in table.tested), key=lambda entry: entry.summary["full"]["diff"])
    significant = {table.entries[i].title for i in table.significant}
    least = noise.floor(noise.pairs(table))
    longest = max(len(entry.title) for entry in rows)
    figure = Figure(figsize=(5.8 + 0.085 * longest, 1.3 + 0.21 * len(rows)), layout="constrained")
    axes = figure.subplots()
    if least:
        axes.axvspan(-least, least, color=figures.GRID, linewidth=0, zorder=0)
    axes.axvline(0, color=figures.SOFT, linewidth=0.8, zorder=1)
    for place, entry in enumerate(rows):
        _row(axes, place, entry, noise.within_noise(entry, least))
    _finish(axes, [entry.title + entry.unfinished + " *" * (entry.title in significant) for entry in rows])
    shaded = f"; shaded: the noise floor, {100 * least:.1f} points" if least else ""
    figures.title(figure, title, *figures.wrapped(figure, f"difference to Full, {LEGEND}{shaded}"))
    return figures.save(figure, path)


def _row(axes: Axes, place: int, entry: ReportRow, grey: bool) -> None:
    beside, colour = entry.summary["full"], FAINT if grey else figures.INK
    axes.plot(beside["ci95"], [place, place], color=colour, linewidth=1.3, zorder=2)
    face = "white" if grey else colour
    axes.plot(beside["diff"], place, "o", markersize=5, color=colour, markerfacecolor=face, zorder=3)


def _finish(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.set_xlabel("points")
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{100 * x:+.0f}".replace("-", "−") if round(100 * x) else "0")
    )
    axes.grid(axis="x", color=figures.GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    figures.plain(axes)
