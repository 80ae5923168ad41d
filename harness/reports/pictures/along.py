"""Draws what a token costs along a long answer: time, tokens read, bytes in use and bytes moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from matplotlib.ticker import FuncFormatter, NullLocator

from harness.reports.compare import Comparison, ReportRow
from harness.reports.pictures import figures
from harness.reports.pictures.figures import Drawn, Look
from harness.reports.pictures.lines import handles, styles
from harness.results.records import Reply

Stretch = tuple[int, int, int]  # its number, the steps before it, and those up to its end
# by row: its cost in each stretch, by the steps up to the stretch's end
Lines = dict[str, dict[float, float]]


class Panel(NamedTuple):
    """Describe a panel: one cost that is drawn along an answer. `cost` returns it for one stretch
    of a reply, in the unit of `name`, or None where it is unknown."""

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
    Panel("time per token (ms)", _ms_per_token, median, True),
    Panel("read per step, of all so far (%)", _percent_read),
    Panel("cache in use (MiB)", partial(_mib, key="used_bytes")),
    Panel("moved per step (MiB)", partial(_mib, key="moved_bytes")),
)


def along(tables: Sequence[Comparison], look: Look) -> Drawn | str:
    """Draw a panel for each table and cost, with a line per row over the stretches of its answers."""
    panels = [
        (table, panel, lines)
        for panel in PANELS
        for table in tables
        if not table.of_perplexity and (lines := _lines(panel, table.entries))
    ]
    if not panels:
        return (
            "no answer is long enough to have several stretches: let models answer in more tokens, "
            "as +experiment=small/long_answer does"
        )
    known = styles([table for table, *_ in panels], lambda entry: entry.title)
    drawn = figures.panels(len(panels), look, of_kind=len(tables))
    for axes, (table, panel, lines) in zip(drawn.axes, panels, strict=True):
        for title, points in lines.items():
            axes.plot(list(points), list(points.values()), **known[title])
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.set_title(drawn.fill(", ".join(filter(None, [table.title, panel.name]))))
    drawn.label("tokens of the answer", "")
    figures.lay_out(drawn, look, handles(known))
    for axes in drawn.axes:
        figures.spaced(axes)
    return Drawn(
        drawn.figure,
        "Costs along the answers (log axis); a point stands for the tokens since the one before it",
    )


def _lines(panel: Panel, entries: Sequence[ReportRow]) -> Lines:
    """Return the lines of a panel; none where all is zero. Times of runs that measure none are left out."""
    lines: Lines = {}
    for entry in entries:
        if panel.of_time and entry.summary["tpot_s"]["p50"] is None:
            continue
        costs, reached = defaultdict[int, list[float]](list), defaultdict[int, list[int]](list)
        replies = (reply for record in entry.run.records for reply in record.replies)
        for reply in (reply for reply in replies if reply["along"]):
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
