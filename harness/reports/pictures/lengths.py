"""Draws the time per token against the length of the prompt, with a line per method and budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from math import ceil, log2
from statistics import median

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.reports.compare import Comparison, ReportRow
from harness.reports.pictures import figures
from harness.reports.pictures.beside import write_beside
from harness.reports.pictures.figures import Drawn, Look
from harness.reports.pictures.lines import handles, is_full, styles

CAPTION = (
    "Median time per token after the second, by the median length of prompts (log axis); lines join the "
    "lengths of a method at the budget that stands at their end"
)
# a row of each method and budget, with the tokens of its prompts, the fewest first, and
# milliseconds per token
Lines = list[tuple[ReportRow, list[float], list[float]]]


def lengths(tables: Sequence[Comparison], look: Look) -> Drawn | str:
    """Draw a panel for each table, which holds all tasks of a model: a step costs by what the cache
    holds, whatever the task is."""
    panels = [(table, lines) for table in tables if (lines := _lines(table))]
    if not panels:
        return "no run has times per token: run without shared_prefill=true and trace=on"
    if all(len(tokens) < 2 for _, lines in panels for _, tokens, _ in lines):
        return "no method has prompts of several lengths: run task.lengths=[1024,2048,4096]"
    known = styles(tables, lambda entry: entry.label)
    drawn = figures.panels(len(panels), look, sharey=True)
    for axes, (table, lines) in zip(drawn.axes, panels, strict=True):
        for row, tokens, times in lines:
            axes.plot(tokens, times, **known[row.label], clip_on=False)
        axes.set_xscale("log", base=2)
        ticks = {2 ** round(log2(length)) for _, tokens, _ in lines for length in tokens}
        axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: figures.tokens(x)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.12)
        axes.set_ylim(bottom=0)
        axes.set_title(drawn.fill(table.title))
    drawn.label("prompt (tokens)", "time per token (ms)")
    shown = {row.label for _, lines in panels for row, *_ in lines}
    figures.lay_out(drawn, look, handles({name: known[name] for name in known if name in shown}))
    without = 0
    for axes, (_, lines) in zip(drawn.axes, panels, strict=True):
        figures.spaced(axes)
        ends = [
            ((tokens[-1], times[-1]), row.budget, known[row.label]["color"])
            for row, tokens, times in lines
            if not is_full(row)
        ]
        without += write_beside(axes, ends, look.small)
    room = f"; budgets without room at their lines: {without}" * bool(without)
    return Drawn(drawn.figure, CAPTION + room)


def _lines(table: Comparison) -> Lines:
    """Return the lines of a table. Runs that measure no times are left out."""
    rows: dict[str, list[ReportRow]] = defaultdict(list)
    for entry in table.entries:
        if entry.summary["tpot_s"]["p50"] is not None:
            rows[entry.title].append(entry)
    return [(same[0], *_line(same)) for same in rows.values()]


def _line(rows: Sequence[ReportRow]) -> tuple[list[float], list[float]]:
    """Return the medians of length and time over the prompts that were asked for with one length,
    or else lie between the same powers of two."""
    prompts: dict[float, list[int]] = defaultdict(list)
    intervals: dict[float, list[float]] = defaultdict(list)
    for record in chain.from_iterable(row.run.records for row in rows):
        for reply in record.replies:
            if reply.intervals_s:
                tokens = reply.history_tokens + reply.prompt_tokens
                length = reply.data.get("length") or 2 ** ceil(log2(tokens))
                prompts[length].append(tokens)
                intervals[length] += reply.intervals_s
    lengths = sorted(prompts)
    return (
        [median(prompts[length]) for length in lengths],
        [1000 * median(intervals[length]) for length in lengths],
    )
