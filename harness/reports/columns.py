"""What a report says of each run: the cells of its row, its scores per group, and the notes below the table."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from harness.config.plugins import suggestion
from harness.reports import turns
from harness.reports.compare import Comparison, ReportRow, asked
from harness.reports.conditions import code_versions
from harness.reports.labels import budget
from harness.reports.likelihoods import cost_difference, perplexities, perplexity_notes
from harness.reports.stamps import legend, stamps
from harness.results.measures import MEASURES, Measure, over_known
from harness.terminal.tables import (
    BYTES,
    SECONDS,
    Column,
    number,
    percent,
    probability,
    quantities,
    quantity,
    share,
    with_ci,
)
from methods.tiers.tier import DEVICE, TIERS, bytes_key


def score_table(comparison: Comparison) -> list[Column]:
    """The main table: what it scored on how much evidence, what it read, how fast it was, how many bytes it took."""
    shown = comparison.heads
    return [
        *names(comparison.entries),
        *(column for column in _measures(comparison) if not shown or _name(column) in shown),
    ]


def with_columns(comparison: Comparison, heads: Sequence[str]) -> Comparison:
    """Return the table with these columns alone, named by their heads in one line and small letters. Raises
    `ValueError` for a name that no column has."""
    known = {_name(column) for column in _measures(comparison)}
    asked_for = tuple(head.lower() for head in heads)
    for head in asked_for:
        if head not in known:
            listed = ", ".join(sorted(known))
            raise ValueError(f"--columns {head}: no column is called so{suggestion(head, known)} There are {listed}.")
    return replace(comparison, heads=asked_for)


def _name(column: Column) -> str:
    return " ".join(column.head.split()).lower()


def _measures(comparison: Comparison) -> list[Column]:
    """The columns of the main table behind the two that name a row."""
    entries, rows = comparison.entries, [entry.summary for entry in comparison.entries]
    memory = [row["memory"] for row in rows]
    return [
        *_scores(comparison),
        Column("n", "", [_count(entry) for entry in entries], values=[row["num_examples"] for row in rows]),
        Column("stamps", "", [stamps(entry, comparison) for entry in entries], left=True),
        share("attended", [row["budget"]["attended"]["share"] for row in rows]),
        share("read per\nKV head\n(union)", [row["budget"]["union"]["share"] for row in rows]),
        *_fidelity(rows),
        quantity("TTFT", [row["ttft_s"]["p50"] for row in rows], SECONDS),
        quantity("TTFT\nlater", [row["ttft_later_s"]["p50"] for row in rows], SECONDS),
        quantity("TT2T", [row["tt2t_s"]["p50"] for row in rows], SECONDS),
        _tpot(rows),
        number("decode", "tok/s", [row["throughput_tok_s"] for row in rows]),
        *stored(memory),
        *_measured(rows),
        share("read\nof Full's", [_of_full(entry) for entry in entries]),
    ]


def names(entries: Sequence[ReportRow]) -> list[Column]:
    """The two columns that say which run a row is."""
    rows = [entry.summary for entry in entries]
    return [
        Column("method", "", [entry.label for entry in entries], left=True),
        Column("budget", "", [budget(row) for row in rows], values=[asked(row) for row in rows]),
    ]


def _scores(comparison: Comparison) -> list[Column]:
    if comparison.of_perplexity:
        return perplexities(comparison)
    rows, holds = [entry.summary for entry in comparison.entries], comparison.significant
    scores = [row["score"] for row in rows]
    beside = [row["full"] or {"diff": None, "ci95": None, "p": None} for row in rows]
    ps = [probability(one["p"]) + "*" * (i in holds) for i, one in enumerate(beside)]
    return [
        Column("score", "95% CI", [with_ci(s["mean"], s["ci95"]) for s in scores], values=[s["mean"] for s in scores]),
        Column("vs full", "95% CI", [difference(one) for one in beside], values=[one["diff"] for one in beside]),
        Column("p", "", ps, values=[one["p"] for one in beside]),
        cost_difference(comparison),
    ]


def _tpot(rows: Sequence[dict[str, Any]]) -> Column:
    p50, p90 = quantities({key: [row["tpot_s"][key] for row in rows] for key in ("p50", "p90")}, SECONDS)
    pairs = [f"{a}/{b}" if a else "" for a, b in zip(p50.cells, p90.cells, strict=True)]
    return replace(p50, head="TPOT p50/90", cells=pairs)


def stored(memory: Sequence[dict[str, Any]]) -> list[Column]:
    """Return the bytes held in each tier, in one unit; a tier that holds nothing has no column."""
    stored = {tier.head: [one.get(bytes_key(name)) for one in memory] for name, tier in TIERS.items()}
    shown = (TIERS[DEVICE].head, *(head for head, sizes in stored.items() if any(sizes)))
    columns = quantities(stored, BYTES)
    return [one if one.head in shown else replace(one, cells=[""] * len(memory)) for one in columns]


def _measured(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Return a column for each measure that has a head; one without values stays out of the table."""
    return [
        _of_unit(measure, [row[measure.section].get(key) for row in rows])
        for key, measure in MEASURES.items()
        if measure.head and measure.section
    ]


def _of_unit(measure: Measure, values: Sequence[float | None]) -> Column:
    assert measure.head
    if measure.unit == "share":
        return share(measure.head, values)
    if measure.unit == "bytes":
        return quantity(measure.head, values, BYTES, "/step", hide_zeros=measure.hides_zeros)
    if measure.unit == "seconds":
        return quantity(measure.head, values, SECONDS, "/step", hide_zeros=measure.hides_zeros)
    return number(measure.head, measure.unit, values)


def _of_full(entry: ReportRow) -> float | None:
    """Bytes read, of those that Full read on the same examples; unknown where one of the two was not traced."""
    key = "read_bytes_per_step"
    every = {record.id: record.measured.get(key) for record in entry.full.records} if entry.full else {}
    pairs = [(record.measured.get(key), every.get(record.id)) for record in entry.run.records]
    return over_known(fmean, [own / whole for own, whole in pairs if own and whole])


def _fidelity(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Columns that stay empty, and so out of the table, where fidelity was not measured."""
    found = [row["fidelity"] or {} for row in rows]
    shares = [share(name, [one.get(name) for one in found]) for name in ("recall", "mass")]
    return [*shares, number("KL", "nats", [one.get("kl") for one in found])]


def notes(comparison: Comparison) -> Iterator[str]:
    """Yield what a reader of the table must know: the legend, warnings, and which rows are not complete."""
    if comparison.of_perplexity:
        yield from perplexity_notes(comparison)
    else:
        yield (
            f"score: {comparison.metric}, 0-100, mean over groups; times are medians, bytes held the largest of any "
            "example, bytes of a step the mean"
        )
    if any(entry.summary["throughput_tok_s"] is not None for entry in comparison.entries):
        yield "decode: tokens behind the second over the time of their steps; sequences of a batch share a step's time"
    stars = comparison.significant or comparison.significant_costs
    if stars or any(entry.significant_groups for entry in comparison.entries):
        measures = ", scores and likelihoods together" if comparison.costed else ""
        yield f"*: differs from Full after Holm's correction, over this table{measures}, or over the groups of one run"
    yield from _told_apart(comparison)
    if any(entry.run.config.get("budget_rule") == "paper" for entry in comparison.entries):
        yield (
            "budget_rule=paper: sinks and windows that the method's paper does not count come on top, and RocketKV's "
            "index is within; see `attended`"
        )
    if any(entry.summary["budget"]["union"]["share"] for entry in comparison.entries):
        yield (
            "attended: what the budget limits, mean over steps; read per KV head (union): the distinct prompt tokens "
            "that one KV head reads for all its query heads, each once"
        )
    if any(entry.summary["memory"].get("read_bytes_per_step") for entry in comparison.entries):
        yield (
            "read: bytes of keys and values that a step reads, and of the index that chooses them, wherever they lie, "
            "mean over steps; a token counts once for a KV head, an index as often as steps choose by it"
        )
    yield from turns.notes(comparison.entries)
    yield from legend(comparison)
    yield from code_versions(comparison.entries)
    yield from map(_copies, (entry for entry in comparison.entries if entry.copies))
    unfinished: dict[str, list[str]] = {}
    for entry in comparison.entries:
        if entry.summary["status"] != "complete":
            unfinished.setdefault(f"{entry.summary['status']} after {_count(entry)} examples", []).append(entry.title)
    yield from (f"not complete, {state}: {', '.join(titles)}" for state, titles in unfinished.items())
    for entry in comparison.entries:
        if again := entry.run.info.get("rescored"):
            yield _rescored(entry, again)
        if entry.full and (versions := (entry.run.scorer, entry.full.scorer))[0] != versions[1]:
            yield f"! {entry.title} and its Full were scored by task versions {' and '.join(versions)}: rescore both"
    yield from _not_held(comparison.entries)
    yield from _merged_warnings(comparison.entries)


def _told_apart(comparison: Comparison) -> Iterator[str]:
    """Yield which rows differ from Full by score or likelihood, and which rows the prompts cannot tell from it."""
    differ = comparison.significant | comparison.significant_costs
    others = {*comparison.tested, *comparison.costed} - differ
    for rows, meaning in ((differ, "differs from Full"), (others, "cannot be told from Full by these prompts")):
        if rows:
            yield f"{meaning}: {', '.join(comparison.entries[i].title for i in sorted(rows))}"


def _not_held(entries: Sequence[ReportRow]) -> Iterator[str]:
    """Yield why rows have no difference to Full though a Full of their task is there, once for each reason."""
    titles: dict[str, list[str]] = {}
    for entry in entries:
        if entry.not_held:
            titles.setdefault(entry.not_held, []).append(entry.title)
    yield from (f"! no difference to Full for {', '.join(found)}: {reason}" for reason, found in titles.items())


def _copies(entry: ReportRow) -> str:
    folders = ", ".join(str(run.folder.parent) for run in (entry.run, *entry.copies))
    times = 1 + len(entry.copies)
    return f"found {times} times with the same answers, shown once, as in the first: {entry.title} ({folders})"


def _rescored(entry: ReportRow, again: Mapping[str, Any]) -> str:
    first, present = again["first"], again["present"]
    return (
        f"scored again: {entry.title} on {again['at'][:10]} (task version {first['task_version']} -> "
        f"{present['task_version']}): {again['changed']} of {entry.summary['num_examples']} scores differ, "
        f"mean {percent(first['mean'], 2)} -> {percent(present['mean'], 2)}"
    )


def _merged_warnings(entries: Sequence[ReportRow]) -> Iterator[str]:
    """A warning of several runs becomes one note; where it counts examples, each run keeps its count."""
    where: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        for warning in entry.summary["warnings"]:
            counted = re.match(r"(\d+) of (\d+) (examples .*)", warning)
            what, count = (counted[3], f" {counted[1]}/{counted[2]}") if counted else (warning, "")
            where[what].append(f"{entry.title}{count}")
    for what, runs in where.items():
        yield f"! {what}: {', '.join(runs)}" if what.startswith("examples ") else f"! {', '.join(runs)}: {what}"


def difference(beside: Mapping[str, Any]) -> str:
    """Write a difference to Full in points with its interval."""
    return with_ci(beside["diff"], beside["ci95"], sign=True)


def _count(entry: ReportRow) -> str:
    done, expected = entry.summary["num_examples"], entry.run.info.get("num_expected")
    return str(done) if expected in (None, done) else f"{done}/{expected}"
