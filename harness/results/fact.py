"""Says what a fact of an answer is: one entry of a table, from which its key in examples.jsonl, its number in
summary.json, its column and its sentences follow.

The tables are in the rooms that find the facts, and harness/results/facts.py joins them. This module imports
nothing of ours, so every room may declare facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Literal

Value = float | None  # null where it was not measured
Reduce = Callable[[Sequence[Any]], Any]
# a fact's key and its values -> entries of a summary
Entries = Callable[[str, Sequence[Any]], Mapping[str, Any]]
Unit = Literal["tokens", "bytes", "share", "seconds", "nats", "examples", "turns", "tier", "other"]
# of summary.json; the last two are both in `memory`
Section = Literal["examples", "answers", "held", "memory"]


def over_known(reduce: Callable[[list[float]], float], values: Sequence[Value]) -> Value:
    """Apply `reduce` to the values that are not None; return None if there are none."""
    known = [value for value in values if value is not None]
    return reduce(known) if known else None


def mean(values: Sequence[Value]) -> Value:
    return over_known(fmean, values)


def total(values: Sequence[Value]) -> Value:
    return over_known(sum, values)


def largest(values: Sequence[Value]) -> Value:
    return over_known(max, values)


def middle(values: Sequence[Value]) -> Value:
    return over_known(median, values)


def first(values: Sequence[Any]) -> Any:
    """Return the first value that is not empty."""
    return next((value for value in values if value), None)


def last(values: Sequence[Any]) -> Any:
    return values[-1]


def unknown(values: Sequence[Any]) -> None:
    """Return None, because the fact belongs to one turn and says nothing of several turns
    together."""


def entry(reduce: Reduce, name: str | None = None) -> Entries:
    """Return a function that makes one entry of a summary, under `name` or the fact's own key."""
    return lambda key, values: {name or key: reduce(values)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Describes a fact that is known of each answer. Its key in a line of examples.jsonl is its key
    in the table.

    `per`: it is known of one turn, or of the steps of one turn. The lines of a conversation's turns
    then have it too, and `over_turns` makes the example's value from theirs. `over_examples` makes
    the numbers of a run, in a `section` of summary.json. `by_turn` makes those of its section
    `turns`, which are about one turn over all conversations (seconds only where clocks can be
    believed). `head`: it is a column of the table of all measurements, or of the table of what
    turns found (`by_turn`).
    """

    unit: Unit
    per: Literal["step", "turn", "example"] = "turn"
    required: bool = False  # a line without it was not written by the harness
    older: Any = None  # its value where a line has none
    over_turns: Reduce = unknown
    section: Section | None = None
    over_examples: Entries | None = None
    by_turn: Entries | None = None
    head: str | None = None
    shown: str = ""  # what the head means
    hides_zeros: bool = False  # the column is left out if it holds only zeros
    # the letter of rows where its number is not 0, and what that means
    stamp: tuple[str, str] | None = None
    alarm: str | None = None  # what a table says of rows where it is true of an example
    # "N examples ..." -> which records
    warnings: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    # of records and config
    caution: Callable[[Sequence[Any], Mapping[str, Any]], Iterator[str]] | None = None
    # of title, records, config
    note: Callable[[str, Sequence[Any], Mapping[str, Any]], Iterator[str]] | None = None
