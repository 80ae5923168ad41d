"""What is asked on a cache that is there already: turns of a conversation, further questions on one context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from harness.config.settings import Settings
from harness.reports.compare import Comparison, ReportRow
from harness.reports.labels import budget
from harness.terminal.tables import SECONDS, Column, counts, number, quantities, quantity, with_ci

DEFAULT = Settings().history
TurnSummary = dict[str, Any]  # what summary.json says of a turn


def notes(entries: Sequence[ReportRow]) -> Iterator[str]:
    """Yield how many prefills ran, where that is fewer than examples, and what the two times to a first token are."""
    rows = [(entry.title, entry.summary) for entry in entries]
    shared = [(title, row) for title, row in rows if row["prefills"] < row["num_examples"]]
    if shared:
        counts = dict.fromkeys(_shared(row["num_examples"], row["prefills"]) for _, row in shared)
        named = "" if len(shared) == len(rows) else f" ({', '.join(title for title, _ in shared)})"
        yield f"questions=shared{named}: {', '.join(counts)}"
    if lost := [entry.title for entry in entries if _finds_nothing(entry)]:
        yield f"history=store ({', '.join(lost)}): no turn found its history; where none fits, give the store more room"
    for count in {len({record.independent for record in one.run.records}): one for one in entries if _united(one)}:
        yield f"questions on one text are not independent: intervals and p count those on each of {count} texts as one"
    if any(row["ttft_later_s"]["p50"] is not None for _, row in rows):
        yield "TTFT: with the prefill; TTFT later: of further turns, or questions on one context, from their own start"


def _shared(questions: int, prefills: int) -> str:
    return f"{questions} questions on {prefills} prefill{'s' * (prefills != 1)}"


def _united(entry: ReportRow) -> bool:
    return any(record.unit for record in entry.run.records)


def _finds_nothing(entry: ReportRow) -> bool:
    later = [turn for number, turn in (entry.summary["turns"] or {}).items() if number != "1"]
    return _is_stored(entry) and bool(later) and not any(turn.get("hits") for turn in later)


def turn_scores(comparison: Comparison) -> list[Column]:
    """Score of each turn; empty where all examples have one, and where texts were fed in place of answers."""
    return [] if comparison.of_perplexity else _by_turn("score\nby turn", comparison, "turns", "score")


def ago_scores(comparison: Comparison) -> list[Column]:
    """Score by how many turns before the question the fact was told; empty where none is."""
    return _by_turn("told so many\nturns before", comparison, "turns_ago", "score")


def turn_times(comparison: Comparison) -> list[Column]:
    """Median time to the first token of each turn, from its own start; empty where all examples have one."""
    return _by_turn("TTFT\nby turn", comparison, "turns", "ttft_s")


def turn_reuse(comparison: Comparison) -> list[Column]:
    """A row per run and turn: where it found its history, what it computed, loaded and saved; empty where all caches
    stayed on the device."""
    rows = reuse_rows(comparison)
    entries, turns = [comparison.entries[place] for place, *_ in rows], [turn for *_, turn in rows]
    stored = [turn if _is_stored(entry) else {} for entry, turn in zip(entries, turns, strict=True)]
    numbers = [number for _, number, _ in rows]
    if not rows:
        return []
    return [
        Column("history\nby turn", "", [entry.label for entry in entries], left=True),
        Column("budget", "", [budget(entry.summary) for entry in entries], left=True),
        Column("turn", "", numbers, values=[int(number) for number in numbers]),
        counts("n", [turn["n"] for turn in turns]),
        Column("found in", "", [_found(turn) if name != "1" else "" for _, name, turn in rows], left=True),
        Column("lost", "", [str(turn.get("lost_turns") or "") for turn in turns]),
        number("reused", "tokens", [turn.get("reused_tokens") for turn in turns]),
        number("computed", "tokens", [turn.get("new_tokens") for turn in turns]),
        quantity("load", [turn.get("load_s") for turn in stored], SECONDS),
        quantity("hidden", [turn.get("hidden_s") for turn in stored], SECONDS, hide_zeros=True),
        quantity("save ahead", [turn.get("save_ahead_s") for turn in stored], SECONDS, hide_zeros=True),
        quantity("save", [turn.get("save_s") for turn in stored], SECONDS),
        quantity("save hidden", [turn.get("save_hidden_s") for turn in stored], SECONDS, hide_zeros=True),
    ]


def reuse_rows(comparison: Comparison) -> list[tuple[int, str, TurnSummary]]:
    """Place of the run, number of the turn, and what is known of it."""
    return [
        (place, number, turn)
        for place, entry in enumerate(comparison.entries)
        if entry.run.config.get("history", DEFAULT) != DEFAULT
        for number, turn in (entry.summary["turns"] or {}).items()
    ]


def _is_stored(entry: ReportRow) -> bool:
    return bool(entry.run.config.get("history", DEFAULT) == "store")


def _found(turn: TurnSummary) -> str:
    """Tiers, with how many histories where there are several."""
    counts = dict(turn.get("hits") or {})
    if missed := turn.get("n", 0) - sum(counts.values()):
        counts["nowhere"] = missed
    return ", ".join(counts if len(counts) == 1 else (f"{tier} {count}" for tier, count in counts.items()))


def _by_turn(head: str, comparison: Comparison, section: str, key: str) -> list[Column]:
    """`key` of a `section` of summary.json; a row for each turn, a column for each run."""
    runs = [entry.summary.get(section) or {} for entry in comparison.entries]
    turns: dict[str, TurnSummary] = max(runs, key=len, default={})
    found = [[run.get(turn, {}) for turn in turns] for run in runs]
    values = {str(place): [turn.get(key) for turn in run] for place, run in enumerate(found)}
    if all(value is None for run in values.values() for value in run):
        return []
    columns = quantities(values, SECONDS)
    if key == "score":
        cells = [[with_ci(turn.get(key), turn.get("ci95")) for turn in run] for run in found]
        columns = [replace(column, unit="", cells=own) for column, own in zip(columns, cells, strict=True)]
    return [
        Column(head, "", list(turns), left=True),
        counts("n", [turn["n"] for turn in turns.values()]),
        Column("tokens\nso far", "", [f"{turn['tokens']:.0f}" if "tokens" in turn else "" for turn in turns.values()]),
        *comparison.under_runs(columns),
    ]
