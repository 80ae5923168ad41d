"""The table that a reader sees first: a row for each run, at most 120 characters wide, and at most five lines below.

The lines say what was compared, what can be concluded, what is not sure, and where the rest is. `--details` of
`harness.report` prints everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from harness.reports.columns import difference, names, stored
from harness.reports.compare import Comparison, ReportRow, beside_full
from harness.reports.conditions import machine_of
from harness.reports.likelihoods import perplexities, signed
from harness.terminal.tables import BYTES, SECONDS, Column, quantity, share, with_ci

WIDTH = 120  # characters
LINE = WIDTH - 2  # of a line below the table, which is indented
ALARM = "ALARM: "  # begins a line on what must be wrong
LEAST_NAMED = 1  # names of a list that are written out even where they do not fit


def overview(table: Comparison) -> list[Column]:
    """Return the columns: score, difference to Full, cost of the right answer, what was read, times, and bytes."""
    rows = [entry.summary for entry in table.entries]
    return [
        *names(table.entries),
        *(perplexities(table) if table.of_perplexity else _scores(table)),
        *([] if table.of_perplexity else [_cost(table)]),
        share("attended", [row["budget"]["attended"]["share"] for row in rows]),
        quantity("TT2T", [row["tt2t_s"]["p50"] for row in rows], SECONDS),
        quantity("TPOT", [row["tpot_s"]["p50"] for row in rows], SECONDS),
        *stored([row["memory"] for row in rows]),
        quantity("moved", [row["memory"]["moved_bytes_per_step"] for row in rows], BYTES, "/step", hide_zeros=True),
    ]


def _scores(table: Comparison) -> list[Column]:
    rows = [entry.summary for entry in table.entries]
    scores = [row["score"] for row in rows]
    against = [row["full"] or {"diff": None, "ci95": None} for row in rows]
    cells = [f"{difference(one)}{'*' * (i in table.significant)}" for i, one in enumerate(against)]
    return [
        Column("score", "95 % CI", [with_ci(s["mean"], s["ci95"]) for s in scores], values=[s["mean"] for s in scores]),
        Column("vs Full", "95 % CI", cells, values=[one["diff"] for one in against]),
    ]


def _cost(table: Comparison) -> Column:
    costs = [beside_full(entry.summary).get("diff") for entry in table.entries]
    cells = [f"{signed(cost)}{'*' * (i in table.significant_costs)}" for i, cost in enumerate(costs)]
    return Column("NLL\nvs Full", "nats", cells, values=costs)


def lines(table: Comparison, rest: str = "with --details") -> list[str]:
    """Return at most four lines that fit `WIDTH` with an indent of two. `rest`: where further cautions are."""
    return [_fitted(line) for line in (_compared(table), *_conclusions(table), _unsure(table, rest)) if line]


def _compared(table: Comparison) -> str:
    lengths = [record.prompt_tokens for entry in table.entries for record in entry.run.records]
    counts = [len(entry.run.records) for entry in table.entries]
    span = _span(lengths)
    measure = "perplexity, the lower the better" if table.of_perplexity else f"{table.metric}, 0 to 100"
    where = dict.fromkeys(machine_of(entry.run) for entry in table.entries)
    machine = next(iter(where)) if len(where) == 1 else f"{len(where)} different machines"
    times = "" if _has_no_times(table) else "; times are medians"
    return f"{_span(counts)} prompts of {span} tokens; score: {measure}; {machine}{times}."


def _span(numbers: Sequence[int]) -> str:
    if not numbers:
        return "0"
    low, high = min(numbers), max(numbers)
    near = high - low <= 0.02 * high
    return f"{round(median(numbers))}" if near else f"{low} to {high}"


def _has_no_times(table: Comparison) -> bool:
    return all(entry.summary["tpot_s"]["p50"] is None for entry in table.entries)


def _conclusions(table: Comparison) -> Iterator[str]:
    """Say which rows differ from Full, and how large a loss of the others may still be."""
    score, cost = table.significant, table.significant_costs
    tested = sorted({*table.tested, *table.costed})
    if apart_from := {entry.title: entry.not_held for entry in table.entries if entry.not_held}:
        yield _listed("Not compared with Full: ", [f"{title}, because {why}" for title, why in apart_from.items()])
    apart = [_told_apart(table.entries[i], i in score, i in cost, table) for i in tested if i in score | cost]
    if apart:
        yield _listed("* differs from Full (Holm's correction): ", apart)
    alike = [table.entries[i] for i in tested if i not in score and table.entries[i].summary["full"]]
    if alike and not table.of_perplexity:
        lowest = min(row.summary["full"]["ci95"][0] for row in alike if row.summary["full"]["ci95"] is not None)
        end = f" (a loss of up to {-100 * lowest:.0f} points is possible)" if lowest < 0 else ""
        yield _listed("No difference in score shown by so few prompts: ", [row.title for row in alike], end)


def _told_apart(row: ReportRow, by_score: bool, by_cost: bool, table: Comparison) -> str:
    if table.of_perplexity:
        return row.title
    worse = [f"{100 * row.summary['full']['diff']:+.0f} points"] if by_score else []
    cost = beside_full(row.summary).get("diff")
    return f"{row.title} {' and '.join([*worse, *([f'{signed(cost)} nats'] if by_cost else [])])}"


def _unsure(table: Comparison, rest: str) -> str:
    """Say what the numbers do not mean: alarms of what must be wrong, unfinished runs, then the alarms in their
    order."""
    told = [
        f"{entry.title}: {entry.summary['status']} after {entry.summary['num_examples']} examples"
        for entry in table.entries
        if entry.summary["status"] != "complete"
    ]
    told += [
        f"{entry.title}: {entry.summary['num_failed']} examples failed and are left out"
        for entry in table.entries
        if entry.summary.get("num_failed")
    ]
    for caution in dict.fromkeys(text for entry in table.entries for text in entry.run.info.get("cautions", ())):
        titles = [entry.title for entry in table.entries if caution in entry.run.info.get("cautions", ())]
        told.append(f"{', '.join(titles) if len(titles) < len(table.entries) else 'all rows'}: {caution}")
    told = [f"{ALARM}{alarm.text}" for alarm in table.alarms if alarm.red] + told
    told += [alarm.text for alarm in table.alarms if not alarm.red]
    if not told:
        return ""
    start = "" if told[0].startswith(ALARM) else "Not sure: "
    more = f"; {len(told) - 1} more {rest}." if len(told) > 1 else "."
    return f"{_fitted(f'{start}{told[0]}', LINE - len(more))}{more}"


def _listed(start: str, items: Sequence[str], end: str = "") -> str:
    """Return a sentence over as many items as fit, with the number of the others."""
    count = len(items)
    while count > LEAST_NAMED and len(_sentence(start, items, count, end)) > LINE:
        count -= 1
    return _sentence(start, items, count, end)


def _sentence(start: str, items: Sequence[str], count: int, end: str) -> str:
    more = f" and {len(items) - count} more" if count < len(items) else ""
    return f"{start}{', '.join(items[:count])}{more}{end}."


def _fitted(line: str, width: int = LINE) -> str:
    return line if len(line) <= width else f"{line[: width - 3].rstrip()}..."
