"""Draws scores against what they cost, or against the budget, with a line per method over its budgets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import inf
from statistics import median
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from harness.reports.compare import Comparison, ReportRow, asked
from harness.reports.pictures import figures
from harness.reports.pictures.beside import write_beside
from harness.reports.pictures.figures import CostName, Drawn, Look, Panels
from harness.reports.pictures.lines import FULL_STYLE, Styles, handles, is_full, styles
from harness.results.fact import total
from methods.tiers.tier import DEVICE, TIERS, bytes_key

# of an axis of shares in percent
TICKS = [digit * 10**power for power in range(-1, 3) for digit in (1, 2, 3, 5, 7)]
BAR = 2  # points: the width of an interval
CROWDED = 6  # from so many lines on, intervals cover more than they say
FRONT: dict[str, Any] = {"color": figures.SOFT, "linewidth": 0.9, "linestyle": ":"}

# by label: costs with their rows, in the order of budgets
Points = Mapping[str, list[tuple[float, ReportRow]]]


class Cost(NamedTuple):
    """Describe a cost that scores are drawn against. Rows whose summary lacks it, or has 0, are not
    drawn."""

    name: str
    meaning: str
    of: Callable[[Mapping[str, Any]], float | None]  # of a summary
    scale: float
    log: bool = False
    needs_full: bool = False  # without Full's, a time says little

    def points(self, entries: Sequence[ReportRow]) -> Points:
        lines: dict[str, list[tuple[float, ReportRow]]] = defaultdict(list)
        for entry in sorted(entries, key=lambda entry: asked(entry.summary)):
            if entry.summary["score"]["mean"] is not None and (cost := self.of(entry.summary)):
                lines[entry.label].append((self.scale * cost, entry))
        return lines

    def shows(self, table: Comparison) -> bool:
        """Return True if a method other than Full has this cost and a score, and Full as well if
        `needs_full`."""
        drawn = [is_full(row) for line in self.points(table.entries).values() for _, row in line]
        lacks_full = self.needs_full and not any(drawn) and any(map(is_full, table.entries))
        return not table.of_perplexity and not all(drawn) and not lacks_full


COSTS: dict[CostName, Cost] = {
    "read": Cost(
        "read per step (%)",
        "share of the prompt's tokens that a KV head reads per step",
        lambda row: row["budget"]["union"]["share"] or row["budget"]["attended"]["share"],
        100,
        log=True,
    ),
    "held": Cost(
        "cache held (MiB)",
        "largest sum of keys, values and indices held in all tiers",
        lambda row: total([row["memory"].get(bytes_key(tier)) for tier in TIERS]),
        2**-20,
    ),
    "kv_device": Cost(
        "on the device (MiB)",
        "largest sum of keys, values and indices held on the device",
        lambda row: row["memory"][bytes_key(DEVICE)],
        2**-20,
    ),
    "moved": Cost(
        "moved per step (MiB)",
        "mean of the bytes that a step moves between tiers",
        lambda row: row["memory"]["moved_bytes_per_step"],
        2**-20,
    ),
    "ttft": Cost(
        "first token (ms)",
        "median time to the first token",
        lambda row: row["ttft_s"]["p50"],
        1000,
        needs_full=True,
    ),
    "tpot": Cost(
        "time per token (ms)",
        "median time per output token",
        lambda row: row["tpot_s"]["p50"],
        1000,
        needs_full=True,
    ),
}
# of budgets, by the type in which they are asked for
UNITS = {
    float: Cost("budget (% of prompt)", "", asked, 100, log=True),
    int: Cost("budget (tokens)", "", asked, 1, log=True),
    str: Cost("budget (MiB)", "", asked, 2**-20, log=True),
}


class Panel(NamedTuple):
    """The scores of a table, against one cost."""

    table: Comparison
    cost: Cost

    @property
    def points(self) -> Points:
        return self.cost.points(self.table.entries)


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


def frontier(tables: Sequence[Comparison], look: Look) -> Drawn | str:
    """Draw a panel for each table and cost, with budgets at the points and the Pareto front of
    complete rows."""
    panels = [
        Panel(table, COSTS[cost])
        for cost in look.costs
        for table in tables
        if COSTS[cost].shows(table)
    ]
    if not panels:
        return _fed(tables) or (
            f"no run has a score and one of the costs {', '.join(look.costs)}: "
            "run a method other than Full on a task that is scored, or name other costs"
        )
    known = _styles(panels)
    drawn, caption = _scores(panels, look, [Line2D([], [], **FRONT, label="Pareto front")])
    for axes, panel in zip(drawn.axes, panels, strict=True):
        pairs = [
            (cost, 100 * row.summary["score"]["mean"])
            for cost, row in chain.from_iterable(panel.points.values())
            if row.summary["status"] == "complete"
        ]
        if reached := sorted({pairs[place] for place in front(pairs)}):
            axes.plot(*zip(*reached, strict=True), drawstyle="steps-post", **FRONT)
    without = 0
    for axes, panel in zip(drawn.axes, panels, strict=True):
        figures.spaced(axes)
        named = [
            (
                (cost, 100 * row.summary["score"]["mean"]),
                row.budget,
                known[row.label]["color"],
            )
            for cost, row in chain.from_iterable(panel.points.values())
            if not is_full(row)
        ]
        without += write_beside(axes, named, look.small)
    caption += ["dotted: the Pareto front of complete rows", "at the points: budgets"]
    meanings = dict.fromkeys(
        f"{panel.cost.name.partition(' (')[0]}: {panel.cost.meaning}{', log axis' * panel.cost.log}"
        for panel in panels
    )
    room = [f"budgets without room at their points: {without}"] * bool(without)
    return Drawn(drawn.figure, "; ".join(["Scores against costs", *caption, *meanings, *room]))


def by_budget(tables: Sequence[Comparison], look: Look) -> Drawn | str:
    """Draw a panel for each table in which a method has several budgets."""
    panels = []
    for table in filter(_vary, tables):
        unit, *others = units = _units(table)
        if others:
            return (
                f"the budgets {' and '.join(units.values())} have no axis in common: "
                "list budgets of one kind in the file of --paper"
            )
        panels.append(Panel(table, UNITS[unit]))
    if not panels:
        return _fed(tables) or (
            "no method has scores at several budgets: run it with -m budget=0.1,0.2,0.4"
        )
    drawn, caption = _scores(panels, look, [], apart=1.5 * BAR)
    for axes, panel in zip(drawn.axes, panels, strict=True):
        costs = {cost for cost, _ in chain.from_iterable(panel.points.values())}
        axes.xaxis.set_major_locator(FixedLocator(sorted(costs)))
        axes.margins(x=0.12)  # holds the lines at the sides
    for axes in drawn.axes:
        figures.spaced(axes)
    return Drawn(drawn.figure, "; ".join(["Scores against budgets (log axis)", *caption]))


def _fed(tables: Sequence[Comparison]) -> str | None:
    if all(table.of_perplexity for table in tables):
        return "texts that are fed have no scores: --figure differences draws what they cost"
    return None


def _broke(entry: ReportRow) -> bool:
    return bool(entry.summary["budget"].get("not_kept"))


def _vary(table: Comparison) -> bool:
    """Return True if a method of the table has scores at several budgets."""
    lines = [] if table.of_perplexity else UNITS[int].points(table.entries).values()
    return any(len({cost for cost, _ in line}) > 1 for line in lines)


def _units(table: Comparison) -> dict[type, str]:
    """Return the types in which the budgets of a table are asked for, each with one such budget."""
    entries = [row for row in table.entries if asked(row.summary) and not is_full(row)]
    return {
        str
        if row.summary["budget"].get("bytes")
        else type(row.summary["budget"]["asked"]): row.budget
        for row in entries
    }


def _scores(
    panels: Sequence[Panel], look: Look, more: Sequence[Artist], apart: float = 0
) -> tuple[Panels, list[str]]:
    """Draw the lines of all panels and the legend, which ends with `more`; return the panels and
    the parts of a caption. Full is a dashed line. Intervals are drawn if there are at most six
    methods. Lines lie so many points of type `apart`."""
    known = _styles(panels)
    entries = [entry for panel in panels for entry in panel.table.entries]
    crowded = len({entry.label for entry in entries if not is_full(entry)}) > CROWDED
    several = len({panel.cost.name for panel in panels}) > 1
    tables = len({panel.table.title for panel in panels})
    drawn = figures.panels(len(panels), look, of_kind=tables, sharey=True)
    drawn.label("" if several else panels[0].cost.name, "score (0-100)")
    for axes, panel in zip(drawn.axes, panels, strict=True):
        lines = panel.points
        for place, (label, points) in enumerate(lines.items()):
            shift = apart * (place - (len(lines) - 1) / 2)
            _line(axes, points, known[label], shift, intervals=not crowded)
        for entry in filter(is_full, panel.table.entries):
            if (score := entry.summary["score"]["mean"]) is not None:
                axes.axhline(100 * score, **FULL_STYLE | {"marker": ""}, zorder=1)
        if several:
            axes.set_xlabel(drawn.fill(panel.cost.name))
        axes.set_title(drawn.fill(panel.table.title))
        _scale(axes, panel.cost)
    low, high = drawn.axes[0].get_ylim()
    drawn.axes[0].set_ylim(max(-8, low), min(112, high))
    figures.lay_out(drawn, look, [*handles(known), *more])
    caption = ["lines join the budgets of a method", "dashed: Full", _intervals(entries, crowded)]
    caption += ["hollow: budget not kept"] * any(map(_broke, entries))
    return drawn, caption


def _styles(panels: Sequence[Panel]) -> Styles:
    return styles([panel.table for panel in panels], lambda entry: entry.label)


def _line(
    axes: Axes,
    points: Sequence[tuple[float, ReportRow]],
    style: dict[str, Any],
    shift: float,
    intervals: bool,
) -> None:
    """Draw the line of one method, which joins its budgets in their order, `shift` points of type
    to the right of them."""
    costs = [cost for cost, _ in points]
    scores = [row.summary["score"] for _, row in points]
    beside = axes.transData + ScaledTranslation(shift / 72, 0, axes.figure.dpi_scale_trans)
    if intervals:
        spans = [score["ci95"] or [score["mean"]] * 2 for score in scores]
        low, high = ([100 * end for end in ends] for ends in zip(*spans, strict=True))
        bars = axes.vlines(costs, low, high, color=style["color"], lw=BAR, alpha=0.3, zorder=2)
        bars.set_transform(beside)
    means = [100 * score["mean"] for score in scores]
    hollow = style | {"linestyle": "", "mfc": "white", "markeredgecolor": style["color"], "mew": 1}
    broke = [place for place, (_, row) in enumerate(points) if _broke(row)]
    for how, every in [(style, None), *[(hollow, broke)] * bool(broke)]:
        [line] = axes.plot(costs, means, **how, markevery=every, zorder=3, clip_on=False)
        line.set_transform(beside)  # after limits were found


def _intervals(entries: Sequence[ReportRow], crowded: bool) -> str:
    """Return what a caption says of the 95 % intervals; of those that are not drawn, how wide they
    typically are."""
    spans = [entry.summary["score"]["ci95"] for entry in entries if not is_full(entry)]
    halves = [(span[1] - span[0]) / 2 for span in spans if span]
    if not crowded or not halves:
        return "bars: 95 % intervals"
    return f"95 % intervals: about ±{100 * median(halves):.0f} points (median of the rows)"


def _scale(axes: Axes, cost: Cost) -> None:
    if cost.log:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.set_xticks([tick for tick in TICKS if low <= tick <= high])
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        # else from 0 on would leave the lines too little room
        if axes.dataLim.xmin < 0.4 * axes.dataLim.xmax:
            axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
