"""Draws what a token costs along a long answer: time, tokens read, bytes in use and bytes moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from harness.reports.compare import Comparison, ReportRow
from harness.reports.pictures import figures
from harness.reports.pictures.frontier import FULL_STYLE, is_full, style
from harness.results.records import Reply

Stretch = tuple[int, int, int]  # its number, the steps before it, and those up to its end
# by row: its cost in each stretch, by the steps up to the stretch's end
Lines = dict[str, dict[float, float]]


class Panel(NamedTuple):
    """One cost that is drawn along an answer. `cost`: of one stretch of a reply, in the named unit; None where it is
    unknown."""

    name: str
    cost: Callable[[Reply, Stretch], float | None]
    typical: Callable[[Sequence[float]], float] = fmean  # over the answers of a run
    of_time: bool = False


def _ms_per_token(reply: Reply, stretch: Stretch) -> float | None:
    """Return the milliseconds per token of a stretch. A step gives one token once the question, whose tokens are fed
    after the seal under protocol=context, is over; the first step's time holds the seal and is left out."""
    _, before, end = stretch
    asked = 0 if reply.context_tokens is None else reply.prompt_tokens - reply.context_tokens
    first, last = max(before - asked, 1), end - asked
    if not first < last < len(reply.token_s):
        return None
    return 1000 * ((reply.token_s[last] - reply.token_s[first]) / (last - first))


def _percent_read(reply: Reply, stretch: Stretch) -> float:
    number, before, end = stretch
    read: float = reply["along"]["attended"][number]
    return 100 * (read / (reply.sealed_at + (before + 1 + end) / 2))


def _mib(reply: Reply, stretch: Stretch, key: str) -> float:
    size: float = reply["along"][key][stretch[0]]
    return size / 2**20


PANELS = (
    Panel("time per token (ms), median", _ms_per_token, median, True),
    Panel("tokens read per step, of all so far (%)", _percent_read),
    Panel("keys, values and indices in use (MiB)", partial(_mib, key="used_bytes")),
    Panel("bytes moved between tiers per step (MiB)", partial(_mib, key="moved_bytes")),
)


def has_along(table: Comparison) -> bool:
    """Return True if some answers are long enough to have several stretches."""
    return not table.of_perplexity and any(_long(entry) for entry in table.entries)


def along(table: Comparison) -> Figure:
    """Draw a panel for each cost, with a line per row over the stretches of its answers."""
    drawn = [(panel, lines) for panel in PANELS if (lines := _lines(panel, table.entries))]
    figure, panels = figures.side_by_side(len(drawn))
    others = [entry.title for entry in table.entries if not is_full(entry)]
    for axes, (panel, lines) in zip(panels, drawn, strict=True):
        for title, points in lines.items():
            how = style(others.index(title)) if title in others else FULL_STYLE
            axes.plot(list(points), list(points.values()), label=title, **how)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens of the answer")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.set_title(panel.name)
        figures.framed(axes)
    figure.legend(
        *panels[-1].get_legend_handles_labels(),
        loc="outside right upper",
        frameon=False,
        fontsize=8.5,
    )
    figures.title(
        figure,
        table.title,
        "along the answers; a point stands for the tokens since the one before it",
    )
    return figure


def _long(entry: ReportRow) -> list[Reply]:
    return [reply for record in entry.run.records for reply in record.replies if reply["along"]]


def _lines(panel: Panel, entries: Sequence[ReportRow]) -> Lines:
    """Return the lines of a panel; none where all is zero. Times of runs that measure none are left out."""
    lines: Lines = {}
    for entry in entries:
        if panel.of_time and entry.summary["tpot_s"]["p50"] is None:
            continue
        costs, reached = defaultdict[int, list[float]](list), defaultdict[int, list[int]](list)
        for reply in _long(entry):
            ends = [int(steps) for steps in reply["along"]["steps"]]
            for number, (before, end) in enumerate(pairwise([0, *ends])):
                if (cost := panel.cost(reply, (number, before, end))) is not None:
                    costs[number].append(cost)
                    reached[number].append(end)
        if costs:
            lines[entry.title] = {
                fmean(reached[n]): panel.typical(values) for n, values in sorted(costs.items())
            }
    return lines if any(any(points.values()) for points in lines.values()) else {}
