"""Draws score against cost: what each method reads, moves and waits for, with one line per method
over its budgets."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import inf
from statistics import median
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from harness.reports.compare import Comparison, ReportRow
from harness.reports.pictures import figures
from harness.results.compared import FULL
from harness.results.fact import total
from methods.tiers.tier import TIERS, bytes_key

# Twelve that differ for normal and for colour-blind eyes (after M. Krzywinski, mk.bcgsc.ca/colorblind); Full is black,
# and grey is for what is within the noise.
COLOURS = (
    "#008df9", "#e20134", "#009f81", "#ff6e3a", "#8400cd", "#ffc33b",
    "#ff5aaf", "#00c2f9", "#9f0162", "#00d302", "#a0522d", "#7a7a00",
)  # fmt: skip
MARKS = "osD^vPXp<>h"  # 11: with 12 colours no pair comes back before 132 lines
SHARES = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
CROWDED = 6  # from so many lines on, intervals cover more than they say
FRONT: dict[str, Any] = {"color": figures.SOFT, "linewidth": 0.9, "linestyle": ":"}
NAME_WIDTH = 30  # characters of a line in the legend
DASHED = (0, (4, 3))
FULL_STYLE: dict[str, Any] = {
    "color": figures.INK,
    "marker": "*",
    "linewidth": 0.8,
    "linestyle": DASHED,
}

# by label: costs, the least first, with their rows
Points = dict[str, list[tuple[float, ReportRow]]]


class Panel(NamedTuple):
    """One cost that scores are drawn against. Rows whose summary lacks it, or has 0, are not
    drawn."""

    name: str
    cost: Callable[[Mapping[str, Any]], float | None]  # of a summary
    scale: float
    log: bool = False
    needs_full: bool = False  # without Full's, a time says little

    def points(self, entries: Sequence[ReportRow]) -> Points:
        lines: Points = defaultdict(list)
        for entry in entries:
            if entry.summary["score"]["mean"] is not None and (cost := self.cost(entry.summary)):
                lines[entry.label].append((self.scale * cost, entry))
        return {
            label: sorted(points, key=lambda point: point[0]) for label, points in lines.items()
        }

    def shows(self, entries: Sequence[ReportRow]) -> bool:
        """Return True if a method other than Full has this cost and a score, and Full as well if
        `needs_full`."""
        drawn = [is_full(entry) for points in self.points(entries).values() for _, entry in points]
        lacks_full = self.needs_full and not any(drawn) and any(map(is_full, entries))
        return not all(drawn) and not lacks_full


PANELS = (
    Panel(
        "prompt tokens a KV head reads per step (%)",
        lambda row: row["budget"]["union"]["share"] or row["budget"]["attended"]["share"],
        100,
        log=True,
    ),
    Panel(
        "keys, values and indices held in all tiers, largest (MiB)",
        lambda row: total([row["memory"].get(bytes_key(tier)) for tier in TIERS]),
        2**-20,
    ),
    Panel(
        "bytes moved between tiers per step, mean (MiB)",
        lambda row: row["memory"]["moved_bytes_per_step"],
        2**-20,
    ),
    Panel(
        "median time per output token (ms)", lambda row: row["tpot_s"]["p50"], 1000, needs_full=True
    ),
)


def is_full(entry: ReportRow) -> bool:
    return bool(entry.summary["method"] == FULL)


def front(points: Sequence[tuple[float, float] | None]) -> set[int]:
    """Return the indices of the points (cost, score) on the Pareto front: no other point costs at
    most as much and scores at least as much."""
    known = [
        (point[0], -point[1], place) for place, point in enumerate(points) if point is not None
    ]
    best, places = (inf, inf), set[int]()
    for cost, loss, place in sorted(known):
        if loss < best[1] or (cost, loss) == best:
            best = cost, loss
            places.add(place)
    return places


def has_frontier(table: Comparison) -> bool:
    """Return True if there is something to draw: a method other than Full, the baseline, with a
    score and a cost."""
    return not table.of_perplexity and any(panel.shows(table.entries) for panel in PANELS)


def frontier(table: Comparison) -> Figure:
    """Draw a panel for each cost. Full is a dashed line, the Pareto front of complete rows a dotted
    one. Intervals are drawn if there are at most six methods. Of more than `figures.MOST` methods,
    those that score best have lines."""
    entries = table.entries
    panels = [panel for panel in PANELS if panel.shows(entries)]
    best: dict[str, float] = {}
    for entry in entries:
        if not is_full(entry):
            best[entry.label] = max(best.get(entry.label, 0), entry.summary["score"]["mean"] or 0)
    labels = sorted(sorted(best, key=best.__getitem__)[-figures.MOST :])
    crowded = len(labels) > CROWDED
    legend = _legend(sorted({entry.label for entry in entries if is_full(entry)}), labels)
    figure = Figure(figsize=_size(len(panels), legend), layout=ConstrainedLayoutEngine(wspace=0.06))
    [all_axes] = figure.subplots(1, len(panels), squeeze=False, sharey=True)
    for axes, panel in zip(all_axes, panels, strict=True):
        points = panel.points(entries)
        for label, some in points.items():
            if label in labels:
                _line(axes, some, style(labels.index(label)), intervals=not crowded)
        _full(axes, entries, points)
        drawn = chain.from_iterable(points.values())
        complete = [
            (cost, row.summary) for cost, row in drawn if row.summary["status"] == "complete"
        ]
        pairs = [(cost, summary["score"]["mean"]) for cost, summary in complete]
        if reached := sorted({pairs[place] for place in front(pairs)}):
            axes.plot(*zip(*reached, strict=True), drawstyle="steps-post", **FRONT)
        _finish(axes, panel)
    first = figure.axes[0]
    first.set_ylabel("score (0-100)" if crowded else "score (0-100), 95 % interval")
    first.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.4g}"))
    low, high = first.get_ylim()
    first.set_ylim(max(-0.03, low), min(1.03, high))
    figure.legend(handles=legend, loc="outside right upper", frameon=False, fontsize=8.5)
    left_out = [f"lines: the best {len(labels)} of {len(best)}; front: of all rows"] * (
        len(labels) < len(best)
    )
    figures.title(figure, table.title, *left_out, *([_widths(entries)] if crowded else []))
    return figure


def _size(panels: int, legend: Sequence[Line2D]) -> tuple[float, float]:
    """Return width and height of the figure in inches, with room for the legend beside the
    panels."""
    names = [str(line.get_label()).split("\n") for line in legend]
    width = 0.7 + 0.075 * max(len(line) for name in names for line in name)
    height = 0.3 + sum(0.08 + 0.15 * len(name) for name in names)
    return 0.6 + 3.6 * panels + width, max(3.7, height)


def style(number: int) -> dict[str, Any]:
    """Return how the line of the method with this number is drawn; Full has a style of its own."""
    mark = MARKS[number % len(MARKS)]
    colour = COLOURS[number % len(COLOURS)]
    line = "-" if number < len(COLOURS) else (0, (3, 1.5))
    return {"color": colour, "marker": mark, "markersize": 6, "linewidth": 1.3, "linestyle": line}


def _line(
    axes: Axes, points: Sequence[tuple[float, ReportRow]], style: Mapping[str, Any], intervals: bool
) -> None:
    """Draw the line of one method, which joins its budgets."""
    costs = [cost for cost, _ in points]
    scores = [row.summary["score"] for _, row in points]
    if intervals:
        low, high = zip(*(score["ci95"] or [score["mean"]] * 2 for score in scores), strict=True)
        axes.vlines(costs, low, high, color=style["color"], linewidth=2.2, alpha=0.3, zorder=2)
    means = [score["mean"] for score in scores]
    axes.plot(
        costs, means, **style, markeredgecolor="white", markeredgewidth=0.5, zorder=3, clip_on=False
    )


def _full(axes: Axes, entries: Sequence[ReportRow], points: Points) -> None:
    """Draw a dashed line at the score of each Full, and a star at its cost if that is known."""
    for entry in filter(is_full, entries):
        if (score := entry.summary["score"]["mean"]) is not None:
            axes.axhline(score, color=figures.INK, linewidth=0.8, linestyle=DASHED, zorder=1)
    star = FULL_STYLE | {"markersize": 10, "linestyle": ""}
    for cost, row in chain.from_iterable(points.values()):
        if is_full(row):
            axes.plot([cost], [row.summary["score"]["mean"]], **star, zorder=3, clip_on=False)


def _widths(entries: Sequence[ReportRow]) -> str:
    """Return a sentence on the typical width of the intervals, for a picture that is too crowded to
    draw them."""
    spans = [entry.summary["score"]["ci95"] for entry in entries if not is_full(entry)]
    halves = [(span[1] - span[0]) / 2 for span in spans if span]
    return (
        f"95 % intervals: about ±{100 * median(halves):.0f} points (median of the rows)"
        if halves
        else ""
    )


def _legend(fulls: Sequence[str], labels: Sequence[str]) -> list[Line2D]:
    """Return the lines of the legend, Full first; long names are broken at spaces."""
    styles = [(label, FULL_STYLE | {"markersize": 9}) for label in fulls]
    styles += [(label, style(number)) for number, label in enumerate(labels)]
    lines = []
    for label, drawn in styles:
        broken = textwrap.fill(label, NAME_WIDTH, break_long_words=False)
        lines.append(Line2D([], [], label=broken, **drawn))
    return [*lines, Line2D([], [], **FRONT, label="Pareto front")]


def _finish(axes: Axes, panel: Panel) -> None:
    axes.set_xlabel(panel.name)
    if panel.log:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.set_xticks([share for share in SHARES if low <= share <= high])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        # else from 0 on would leave the lines too little room
        if axes.dataLim.xmin < 0.4 * axes.dataLim.xmax:
            axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    figures.framed(axes)
