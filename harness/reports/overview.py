"""The lines below the first table of a report, in words: what was compared, what can be concluded,
and what is doubtful. The table itself is `columns.overview`; `document.overview_text` puts both
together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from harness.reports.columns import NOT_KEPT, signed
from harness.reports.compare import Comparison, ReportRow
from harness.reports.conditions import machine_of
from harness.results.alarms import ANSWER_CUT
from harness.results.facts import FACTS
from harness.terminal.tables import percent

WIDTH = 120  # characters of the table
LINE = WIDTH - 2  # of a line below the table, which is indented
ALARM = "ALARM: "  # begins a line on what must be wrong
MOST_LINES = 5  # below the table, with one more that says where the rest is
LONG_ANSWER = 256  # tokens; in an answer of so many the end is what counts
TAIL = 36  # characters at the end of a line that is cut


def lines(table: Comparison, rest: str = "with --details") -> list[str]:
    """Return the lines below the first table, shortened to fit: at most five. The last line counts
    those that are left out; `rest` says where they are found."""
    conclusions = [_listed(*parts) for parts in _conclusions(table)]
    shown = [_compared(table), *_too_long(table), *conclusions]
    known = list(_cautions(table))
    most = max(1, MOST_LINES - len(shown))
    shown += known[:most]
    if len(known) > most:
        shown[-1] = f"{shown[-1].removesuffix('.')}; {len(known) - most} more {rest}."
    return [_fitted(line) for line in shown]


def all_lines(table: Comparison) -> list[str]:
    """Return all lines that stand above a table (what was compared, conclusions, cautions), none of
    them shortened."""
    conclusions = [f"{start}{', '.join(items)}{end}." for start, items, end in _conclusions(table)]
    return [_compared(table), *_too_long(table), *conclusions, *_cautions(table)]


def _compared(table: Comparison) -> str:
    rows = [entry.summary for entry in table.entries]
    lengths = [record.prompt_tokens for entry in table.entries for record in entry.run.records]
    generations = [entry.run.config.get("generation") or {} for entry in table.entries]
    generation = max(generations, key=_samples)
    drawn = _samples(generation)
    temperature = generation.get("temperature")
    metric = "pass@1" if drawn > 1 else table.metric
    measure = "perplexity, the lower the better" if table.of_perplexity else f"{metric}, 0 to 100"
    where = dict.fromkeys(machine_of(entry.run) for entry in table.entries)
    machine = next(iter(where)) if len(where) == 1 else f"{len(where)} different machines"
    times = "" if all(row["tpot_s"]["p50"] is None for row in rows) else "; times are medians"
    asked = [entry.run.records for entry in table.entries]
    counts = [len({record.independent for record in some} if drawn > 1 else some) for some in asked]
    prompts = f"{_span(counts)} prompt{'s' * ({*counts} != {1})} of {_span(lengths)} tokens"
    answers = f" x {drawn} answers" * (drawn > 1) + f" at temperature {temperature}" * bool(
        temperature
    )
    return f"{prompts}{answers}; score: {measure}; {machine}{times}."


def _samples(generation: Mapping[str, Any]) -> int:
    return int(generation.get("samples", 1))


def _span(numbers: Sequence[int]) -> str:
    if not numbers:
        return "0"
    low, high = min(numbers), max(numbers)
    return f"{round(median(numbers))}" if high - low <= 0.02 * high else f"{low} to {high}"


def _too_long(table: Comparison) -> Iterator[str]:
    """Yield one line if prompts were too long for the model's window and were cut or left out. The
    rows of a table have the same prompts, so the first row that knows speaks for all."""
    for entry in table.entries:
        way = entry.run.config.get("too_long")
        cut = entry.summary.get("num_cut")
        skipped = entry.summary.get("num_skipped")
        if way not in (None, "refuse") and (cut or skipped):
            where = "at the beginning" if way == "left" else "in the middle"
            count = f"of {_asked(entry)} prompts"
            parts = [f"{cut} {count} cut {where}"] * bool(cut)
            parts += [f"{skipped} {count} left out"] * bool(skipped)
            yield f"Longer than the model's window: {' and '.join(parts)} (too_long={way})."
            return


def _asked(entry: ReportRow) -> int:
    run = entry.run
    return len(run.records) + len(run.failed) + len(run.skipped)


def _conclusions(table: Comparison) -> Iterator[tuple[str, list[str], str]]:
    """Yield the parts of sentences (start, items, end): which rows differ from Full, which do not,
    how large a loss these may still have, and which did not keep their budget."""
    entries = table.entries
    if alone := [f"{entry.title}, because {entry.not_held}" for entry in entries if entry.not_held]:
        yield "Not compared with Full: ", alone, ""
    if apart := [
        _loss(entry, table) for entry in entries if entry.score_differs or entry.cost_differs
    ]:
        yield "* differs from Full (Holm's correction): ", apart, ""
    if alike := [
        entry for entry in entries if entry.score_p is not None and not entry.score_differs
    ]:
        intervals = [entry.summary["full"]["ci95"] for entry in alike]
        lowest = min(interval[0] for interval in intervals if interval is not None)
        end = f" (a loss of {-100 * lowest:.0f} points is possible)" if lowest < 0 else ""
        yield "Scores not told from Full's: ", [entry.title for entry in alike], end
    broken = defaultdict[str, list[str]](list)
    for entry in entries:
        broken[entry.summary["budget"].get("not_kept") or ""].append(entry.title)
    if said := [f"{', '.join(titles)} {why}" for why, titles in broken.items() if why]:
        yield f"{NOT_KEPT} budget not kept: ", said, ""


def _loss(entry: ReportRow, table: Comparison) -> str:
    if table.of_perplexity:
        return entry.title
    points = [f"{100 * entry.summary['full']['diff']:+.0f} points"] if entry.score_differs else []
    nats = [f"{signed(entry.cost['diff'])} nats"] if entry.cost_differs else []
    return f"{entry.title} {' and '.join([*points, *nats])}"


def _cautions(table: Comparison) -> Iterator[str]:
    """Yield the lines that limit what the numbers mean: red alarms first, then what is missing,
    then what is doubtful."""
    yield from (f"{ALARM}{alarm.text}." for alarm in table.alarms if alarm.red)
    yield from _answers_cut(table)
    yield from _out_of_tokens(table)
    doubts = [text for entry in table.entries for text in _of_row(entry)]
    cautions = defaultdict[str, list[str]](list)
    for entry in table.entries:
        for caution in dict.fromkeys(entry.run.info.get("cautions", ())):
            cautions[caution].append(entry.title)
    for caution, titles in cautions.items():
        doubts.append(
            f"{', '.join(titles) if len(titles) < len(table.entries) else 'all rows'}: {caution}"
        )
    doubts += [alarm.text for alarm in table.alarms if not alarm.red]
    for entry in table.entries:
        if capped := entry.summary["budget"].get("capped_share"):
            doubts.append(
                f"{entry.title}: the budget cut {percent(capped)} % of the samples short, so their error has no bound"
            )
    yield from (f"Caution: {text}." for text in doubts)


def _answers_cut(table: Comparison) -> Iterator[str]:
    """Yield one line if cutting took the right answer out of prompts. All rows have the same
    prompts, so the row in which most prompts lost it speaks for all."""
    worst = max(table.entries, key=_lost_answers)
    if count := _lost_answers(worst):
        yield f"Caution: in {count} of {_asked(worst)} prompts the answer was in the part that was cut."


def _lost_answers(entry: ReportRow) -> int:
    warnings = [record["warnings"] for record in entry.run.records]
    return sum(any(text.startswith(ANSWER_CUT) for text in of_record) for of_record in warnings)


def _out_of_tokens(table: Comparison) -> Iterator[str]:
    """Yield one line if answers ran into the token limit, and answers are drawn or long. A short
    answer may well stop at the limit, after it has said what was asked."""
    parts = []
    for entry in table.entries:
        drawn = _samples(entry.run.config.get("generation") or {}) > 1
        records = [record for record in entry.run.records if record.replies]
        cut = [record for record in records if record.replies[-1].stop == "length"]
        if count := sum(drawn or len(record.tokens) >= LONG_ANSWER for record in cut):
            parts.append(f"{entry.title} {count} of {len(entry.run.records)}")
    if parts:
        yield f"Caution: answers ran into the token limit: {', '.join(parts)}."


def _of_row(entry: ReportRow) -> Iterator[str]:
    """Yield what is missing from a row."""
    row = entry.summary
    if row["status"] != "complete":
        yield f"{entry.title}: {row['status']} after {row['num_examples']} examples"
    if row.get("num_failed"):
        yield f"{entry.title}: {row['num_failed']} of {_asked(entry)} examples failed"
    for fact in FACTS.values():
        if fact.caution:
            yield from (
                f"{entry.title}: {text}"
                for text in fact.caution(entry.run.records, entry.run.config)
            )


def _listed(start: str, items: Sequence[str], end: str) -> str:
    """Return a sentence with as many of its items as fit into a line (at least one) and the number
    of the others."""
    for count in range(min(len(items), LINE), 0, -1):
        more = f" and {len(items) - count} more" if count < len(items) else ""
        sentence = f"{start}{', '.join(items[:count])}{more}{end}."
        if len(sentence) <= LINE:
            break
    return sentence


def _fitted(line: str) -> str:
    """Return the line; if it is too long, words in its middle are cut out, so that its end stays."""
    if len(line) <= LINE:
        return line
    tail = line[-TAIL:].partition(" ")[2] or line[-TAIL:]
    return f"{line[: LINE - 4 - len(tail)].rpartition(' ')[0]} ... {tail}"
