"""Joins the tables of facts into the one that records, summaries and reports read.

A fact of an answer is declared once, as one entry of the table of the module that finds it:
engine/facts.py, prompts/facts.py (thoughts), jobs/facts.py (examples) and cachedattention/facts.py
(histories) below harness/, and measures.py here. The module that finds a fact hands over its value
under its key, in `facts` of a generation, a stop rule, a conversation, a prepared example or a
transcript; the runner merges these mappings and knows none of their keys.

A line of examples.jsonl has the fields of `Reply` and `Record` that every answer has (tokens,
times, score), then all facts in the order of this table. A record gives a fact by its key:
`record["cut_tokens"]`. `over_turns` makes a conversation's value from those of its turns, and
`in_section` the numbers of summary.json, from which tables, CSV and trackers follow. Reports take
the columns, stamps, alarms, warnings, cautions and notes from the entries. A line that lacks a
fact, because it is older, has its `older` value.

To add a fact, write its entry and hand over its value; a new table needs one line below. The tables
import only the form of an entry (fact.py), and no torch, so that reports start at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from harness.cachedattention.facts import HISTORY
from harness.engine.facts import GENERATED, held
from harness.jobs.facts import EXAMPLES, TASK
from harness.prompts.facts import THOUGHTS
from harness.results.fact import Fact, Section, Unit
from harness.results.measures import MEASURES
from methods.tiers.tier import TIERS

BY_TURN: tuple[Unit, ...] = (
    "turns",
    "tier",
    "tokens",
    "seconds",
)  # units of what summary.json has of each turn, in its order


class _Facts(Mapping[str, Fact]):
    """Map keys to all facts, in the order of a line of examples.jsonl. A plug-in may add a tier at
    any time."""

    def __getitem__(self, key: str) -> Fact:
        return joined(tuple(TIERS))[key]

    def __iter__(self) -> Iterator[str]:
        return iter(joined(tuple(TIERS)))

    def __len__(self) -> int:
        return len(joined(tuple(TIERS)))


@cache
def joined(tiers: tuple[str, ...]) -> dict[str, Fact]:
    """Return all facts by key where these tiers exist."""
    return {**GENERATED, **TASK, **THOUGHTS, **HISTORY, **EXAMPLES, **held(tiers), **MEASURES}


FACTS = _Facts()


def facts_of(values: Mapping[str, Any], *, example: bool) -> dict[str, Any]:
    """Return all facts of an example, or of one of its turns, from what is known of it by key."""
    return {
        key: values.get(key, fact.older)
        for key, fact in FACTS.items()
        if example or fact.per != "example"
    }


def over_turns(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the facts of a conversation from those of its turns."""
    known = {key: fact for key, fact in FACTS.items() if fact.per != "example"}
    return {key: fact.over_turns([turn[key] for turn in turns]) for key, fact in known.items()}


def in_section(section: Section, records: Sequence[Any]) -> dict[str, Any]:
    """Return the entries of a section of summary.json, over all records of a run."""
    entries = dict[str, Any]()
    for key, fact in FACTS.items():
        if fact.section == section and fact.over_examples:
            entries |= fact.over_examples(key, [record[key] for record in records])
    return entries


def of_turn(replies: Sequence[Any], clocked: Sequence[Any]) -> dict[str, Any]:
    """Return the entries of one turn over all conversations. `clocked`: the replies whose clocks can be believed."""
    entries = dict[str, Any]()
    for key, fact in by_unit(BY_TURN):
        if fact.by_turn:
            known = clocked if fact.unit == "seconds" else replies
            entries |= fact.by_turn(key, [reply[key] for reply in known])
    return entries


def by_unit(units: Sequence[Unit]) -> list[tuple[str, Fact]]:
    """Return the facts of these units with their keys, ordered by unit."""
    return [(key, fact) for unit in units for key, fact in FACTS.items() if fact.unit == unit]
