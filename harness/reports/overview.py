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
from harness.terminal.tables import BYTES, SECONDS, Column, percent, quantity, share, with_ci

WIDTH = 120  # characters
LINE = WIDTH - 2  # of a line below the table, which is indented
ALARM = "ALARM: "  # begins a line on what must be wrong
MOST_LINES = 4  # below the table, with one more that says where the rest is
OFF_BUDGET = 0.1  # of the budget: what steps read may differ from it by so much
TAIL = 36  # characters at the end of a line that is cut
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


def lines(table: Comparison, rest: str = "with --details", width: int = LINE) -> list[str]:
    """Return at most four lines of at most `width` characters. `rest`: where further cautions are."""
    said = [line for line in (_compared(table), *_conclusions(table, width)) if line]
    return [_fitted(line, width) for line in [*said, *_cautions(table, rest, max(1, MOST_LINES - len(said)))]]


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


def _conclusions(table: Comparison, width: int) -> Iterator[str]:
    """Say which rows differ from Full, and how large a loss of the others may still be."""
    score, cost = table.significant, table.significant_costs
    tested = sorted({*table.tested, *table.costed})
    if apart_from := {entry.title: entry.not_held for entry in table.entries if entry.not_held}:
        yield _listed(
            "Not compared with Full: ", [f"{title}, because {why}" for title, why in apart_from.items()], width
        )
    apart = [_told_apart(table.entries[i], i in score, i in cost, table) for i in tested if i in score | cost]
    if apart:
        yield _listed("* differs from Full (Holm's correction): ", apart, width)
    alike = [table.entries[i] for i in tested if i not in score and table.entries[i].summary["full"]]
    if alike and not table.of_perplexity:
        lowest = min(row.summary["full"]["ci95"][0] for row in alike if row.summary["full"]["ci95"] is not None)
        end = f" (a loss of {-100 * lowest:.0f} points is possible)" if lowest < 0 else ""
        yield _listed("Scores not told from Full's: ", [row.title for row in alike], width, end)


def _told_apart(row: ReportRow, by_score: bool, by_cost: bool, table: Comparison) -> str:
    if table.of_perplexity:
        return row.title
    worse = [f"{100 * row.summary['full']['diff']:+.0f} points"] if by_score else []
    cost = beside_full(row.summary).get("diff")
    return f"{row.title} {' and '.join([*worse, *([f'{signed(cost)} nats'] if by_cost else [])])}"


def _cautions(table: Comparison, rest: str, most: int) -> list[str]:
    """Return at most so many lines on what the numbers do not mean: what must be wrong first, then what is missing,
    then what is doubtful. The last one counts those that are left out."""
    told = [f"{ALARM}{alarm.text}" for alarm in table.alarms if alarm.red]
    told += [text for entry in table.entries for text in _of_row(entry)]
    for caution in dict.fromkeys(text for entry in table.entries for text in entry.run.info.get("cautions", ())):
        titles = [entry.title for entry in table.entries if caution in entry.run.info.get("cautions", ())]
        told.append(f"{', '.join(titles) if len(titles) < len(table.entries) else 'all rows'}: {caution}")
    told += [alarm.text for alarm in table.alarms if not alarm.red]
    shown = [text if text.startswith(ALARM) else f"Caution: {text}" for text in told[:most]]
    if len(told) > most:
        shown[-1] += f"; {len(told) - most} more {rest}"
    return [f"{text}." for text in shown]


def _of_row(entry: ReportRow) -> Iterator[str]:
    """Yield what is missing from a row, and whether it read much more or less than its budget."""
    row = entry.summary
    if row["status"] != "complete":
        yield f"{entry.title}: {row['status']} after {row['num_examples']} examples"
    if row.get("num_failed"):
        yield f"{entry.title}: {row['num_failed']} examples failed and are left out"
    asked, read = row["budget"]["asked"], row["budget"]["attended"]["share"]
    config = entry.run.config
    plain = config.get("budget_rule", "read") == "read" and config.get("align", "tokens") == "tokens"
    plain = plain and not config.get("dense_layers")
    if plain and isinstance(asked, float) and read is not None and abs(read - asked) > OFF_BUDGET * asked:
        yield f"{entry.title} read {percent(read)} % of the prompt, not {percent(asked)} %"


def _listed(start: str, items: Sequence[str], width: int, end: str = "") -> str:
    """Return a sentence over as many items as fit, with the number of the others."""
    count = len(items)
    while count > LEAST_NAMED and len(_sentence(start, items, count, end)) > width:
        count -= 1
    return _sentence(start, items, count, end)


def _sentence(start: str, items: Sequence[str], count: int, end: str) -> str:
    more = f" and {len(items) - count} more" if count < len(items) else ""
    return f"{start}{', '.join(items[:count])}{more}{end}."


def _fitted(line: str, width: int) -> str:
    """Return the line, cut in its middle where it is too long, so that its end stays."""
    tail = line[-TAIL:] if len(line) > width else ""
    return f"{line[: width - 5 - len(tail)].rstrip()} ... {tail.lstrip()}" if tail else line
