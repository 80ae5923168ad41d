"""The tables of scores by group of examples and by turn, with a row for each run, as papers print
them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp
from typing import Any

from evals import stats
from evals.base import AVERAGES
from evals.stats import ALPHA
from harness.config.settings import Settings
from harness.reports.columns import names
from harness.reports.compare import PERPLEXITY, Comparison, ReportRow
from harness.results.compared import paired
from harness.results.fact import Unit
from harness.results.facts import by_unit
from harness.terminal.tables import (
    SECONDS,
    Column,
    counts,
    digits,
    number,
    percent,
    quantities,
    quantity,
    with_ci,
)

# of the columns of what turns found, in their order
UNITS: tuple[Unit, ...] = ("tier", "turns", "tokens", "seconds")
# a run, the number of a turn, what its summary has of that
ReuseRow = tuple[ReportRow, str, Mapping[str, Any]]


def group_table(table: Comparison) -> list[Column]:
    """Return columns with the score of each group of examples; empty if there is only one group."""
    scores = [entry.summary["score"]["groups"] for entry in table.entries]
    groups = list(dict.fromkeys(group for run in scores for group in run))
    if len(groups) < 2:
        return []
    sizes = {group: max(run[group]["n"] for run in scores if group in run) for group in groups}
    columns = names(table.entries)
    if table.of_perplexity:
        costs = [(entry.summary["likelihood"] or {}).get("groups", {}) for entry in table.entries]
        for group, size in sizes.items():
            perplexities = [exp(run[group]["mean"]) if group in run else None for run in costs]
            columns.append(number(group, f"n = {size}", perplexities))
        return columns
    starred = [differing_groups(entry) for entry in table.entries]
    for group, size in sizes.items():
        cells, means = [], []
        for run, apart in zip(scores, starred, strict=True):
            score = run.get(group) or {"mean": None, "n": size}
            # with the number of examples so far, where the group is unfinished
            so_far = f" ({score['n']})" if score["n"] < size else ""
            cells.append(percent(score["mean"]) + "*" * (group in apart) + so_far)
            means.append(score["mean"])
        columns.append(Column(group, f"n = {size}", cells, values=means))
    return columns


def differing_groups(entry: ReportRow) -> set[str]:
    """Return the groups of examples whose scores differ significantly from those of Full, the
    baseline, after Holm's correction over the groups of this run; empty if there is only one
    group."""
    groups: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for ours, theirs in paired(entry.run.records, entry.full.records if entry.full else []):
        groups[ours.group].append((ours.score, theirs.score, ours.independent))
    if len(groups) < 2:
        return set()
    adjusted = stats.holm([stats.p_value(*zip(*pairs, strict=True)) for pairs in groups.values()])
    return {group for group, p in zip(groups, adjusted, strict=True) if p < ALPHA}


def average_table(table: Comparison) -> list[Column]:
    """Return columns with the averages that the task itself defines over its groups; empty if it
    defines none but the mean. Values above 1 are no scores and are not shown in percent."""
    runs = [entry.summary["score"]["averages"] for entry in table.entries]
    known = {"mean", PERPLEXITY} if table.of_perplexity else {"mean"}  # of other tables
    columns = []
    for average in dict.fromkeys(name for run in runs for name in run if name not in known):
        values = [run.get(average) for run in runs]
        write = digits if any(value and value > 1 for value in values) else percent
        cells = ["" if value is None else write(value) for value in values]
        columns.append(Column(average, "", cells, values=values))
    return [*names(table.entries), *columns] if columns else []


def average_meanings(table: Comparison) -> str:
    """Return an explanation of the averages that the task defines over its groups, for those in the
    table whose names do not explain themselves; empty text if there are none."""
    shown = {name for entry in table.entries for name in entry.summary["score"]["averages"]}
    return "; ".join(f"{name}: {meaning}" for name, meaning in AVERAGES.items() if name in shown)


def by_turn(table: Comparison, section: str, key: str) -> list[Column]:
    """Return a column per turn with one number of the summaries: the entry `key` of their section
    `section`; no column if no run has it. In the section "turns", number n belongs to turn n; in
    "turns_ago", to facts that were told n turns before they were asked for. A turn has no "score"
    if texts were fed; "ttft_s" is the median time to the first token from the turn's own start."""
    if (section, key) == ("turns", "score") and table.of_perplexity:
        return []
    runs = [entry.summary.get(section) or {} for entry in table.entries]
    longest: dict[str, Any] = max(runs, key=len, default={})
    values = {turn: [run.get(turn, {}).get(key) for run in runs] for turn in longest}
    if all(value is None for some in values.values() for value in some):
        return []
    word = "turn " if section == "turns" else ""
    columns = names(table.entries)
    measured = quantities({f"{word}{turn}": some for turn, some in values.items()}, SECONDS)
    for column, (turn, known) in zip(measured, longest.items(), strict=True):
        if key == "score":
            scores = [run.get(turn, {}) for run in runs]
            column = replace(
                column,
                unit="",
                cells=[with_ci(score.get(key), score.get("ci95")) for score in scores],
            )
        so_far = f"{known['tokens']:.0f} tokens so far" if "tokens" in known else ""
        size = ", ".join(filter(None, (column.unit, f"n = {known['n']}", so_far)))
        columns.append(replace(column, unit=size))
    return columns


def turn_reuse(table: Comparison) -> list[Column]:
    """Return a table with a row for each run and turn: where the turn found the cache of its
    history, how many tokens it computed, and the seconds of loading and saving. Empty if all caches
    stayed on the device."""
    usual = Settings().history  # on the device
    rows = [
        (entry, place, turn)
        for entry in table.entries
        if entry.run.config.get("history", usual) != usual
        for place, turn in (entry.summary["turns"] or {}).items()
    ]
    if not rows:
        return []
    entries = [entry for entry, *_ in rows]
    turns = [turn for *_, turn in rows]
    return [
        *names(entries),
        counts("turn", [int(place) for _, place, _ in rows]),
        counts("n", [turn["n"] for turn in turns]),
        *(
            _of_turns(key, fact.head, fact.unit, rows)
            for key, fact in by_unit(UNITS)
            if fact.by_turn and fact.head
        ),
    ]


def _of_turns(key: str, head: str, unit: str, rows: Sequence[ReuseRow]) -> Column:
    """Return the column of a fact that turns have (`Fact.by_turn`)."""
    values = [turn.get(key) for *_, turn in rows]
    if unit == "tier":
        found = [_found(turn) if place != "1" else "" for _, place, turn in rows]
        return Column(head, "", found, left=True)
    if unit == "seconds":
        stored = [
            value if entry.run.config.get("history") == "store" else None
            for value, (entry, *_) in zip(values, rows, strict=True)
        ]
        return quantity(head, stored, SECONDS, hide_zeros=True)
    if unit == "tokens":
        return number(head, unit, values)
    return Column(head, "", [str(value or "") for value in values])


def _found(turn: Mapping[str, Any]) -> str:
    """Return the tiers in which a turn's histories were found, as text; with counts if there are
    several."""
    hits = dict(turn.get("hits") or {})
    if missed := turn.get("n", 0) - sum(hits.values()):
        hits["nowhere"] = missed
    return ", ".join(
        hits if len(hits) == 1 else (f"{tier} {count}" for tier, count in hits.items())
    )
