"""Score against cost in single numbers: which rows nothing beats, and the bytes that stay within a point of Full."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from harness.reports.columns import difference
from harness.reports.compare import Comparison, Entry
from harness.reports.labels import budget
from harness.results.alarms.run import at_chance
from harness.results.pairs import FULL
from harness.results.store import StoredRun
from harness.results.summary_file import method_of
from harness.terminal.tables import BYTES, Column, counts, quantity, share
from methods.tiers.tier import DEVICE, TIERS

CLOSE = 0.01  # a point
CAPTION = "Bytes to stay within 1 point of Full"
MEANING = (
    "bytes within 1 point: of the measured budgets at which a method scores at most 1 point below Full on the same "
    "prompts, the one with the fewest bytes (KV on the device, and what a step moves there; added up for each example, "
    "and then the largest of any, for memory must hold it). The other bytes are those of that example. Nothing is "
    "interpolated; the interval says how sure the difference is"
)


class Needed(NamedTuple):
    """Bytes of one example, of a conversation its turn, that needs the most."""

    kv: Mapping[str, int]  # by tier
    moved: float  # per step

    @property
    def total(self) -> float:
        """What a step needs on the device: what lies there, and what is moved there."""
        return self.kv[DEVICE] + self.moved


def front(points: Sequence[tuple[float, float] | None]) -> set[int]:
    """Places of the (cost, score) that no other beats: none costs as little and scores more, or costs less and scores
    as much."""
    known = [(i, point) for i, point in enumerate(points) if point is not None]
    return {i for i, (cost, score) in known if not any(_beats(other, (cost, score)) for _, other in known)}


def _beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] <= b[0] and a[1] >= b[1] and a != b


def needed(entry: Entry) -> Needed | None:
    """Of the example that needs the most; None where no example says what it moved."""
    replies = [reply for record in entry.run.records for reply in record.replies]
    moved = [(reply.kv, reply.measured.get("moved_bytes_per_step")) for reply in replies]
    known = [Needed(held, bytes_) for held, bytes_ in moved if bytes_ is not None]
    return max(known, key=lambda one: one.total, default=None)


def within(comparison: Comparison) -> dict[str, Entry | None]:
    """By the label of a method, its row with the fewest bytes within a point of Full; None where there is none. Rows
    that are not complete are no evidence, nor are those whose Full does no better than guessing."""
    rows: dict[str, list[Entry]] = defaultdict(list)
    for entry in comparison.entries:
        known = entry.summary["full"] and entry.summary["status"] == "complete" and needed(entry) is not None
        if method_of(entry.run) != FULL and known and not _guesses(entry.full):
            rows[entry.label].append(entry)
    close = {label: [e for e in some if e.summary["full"]["diff"] >= -CLOSE] for label, some in rows.items()}
    return {label: min(some, key=_total, default=None) for label, some in close.items()}


def _total(entry: Entry) -> float:
    """inf where it is not known"""
    found = needed(entry)
    return inf if found is None else found.total


def _guesses(full: StoredRun | None) -> bool:
    return full is not None and at_chance(full.records, full.info.get("task_info", {}).get("chance", 0.0))


def within_table(comparison: Comparison) -> list[Column]:
    """`MEANING`, fewest bytes first; empty where nothing is held against Full."""
    found = within(comparison)
    best = sorted(found.items(), key=lambda pair: (_total(pair[1]) if pair[1] else inf, pair[0]))
    if not best:
        return []
    rows = [entry for _, entry in best]
    bytes_ = [needed(row) if row else None for row in rows]
    total = quantity("bytes within 1 point", [one and one.total for one in bytes_], BYTES)
    return [
        Column("method", "", [label for label, _ in best], left=True),
        replace(total, cells=[cell or "not reached" for cell in total.cells], unit="" if total.empty else total.unit),
        share("of Full's", [_of_full(row) for row in rows]),
        _held(DEVICE, bytes_),
        quantity("moved", [one and one.moved for one in bytes_], BYTES, "/step", hide_zeros=True),
        *(_held(tier, bytes_) for tier in TIERS if tier != DEVICE),
        Column("at budget", "", [budget(row.summary) if row else "" for row in rows]),
        Column(
            "vs full",
            "95% CI",
            [difference(row.summary["full"]) if row else "" for row in rows],
            values=[row.summary["full"]["diff"] if row else None for row in rows],
        ),
        counts("n", [row.summary["num_examples"] if row else None for row in rows]),
    ]


def _held(tier: str, needed: Sequence[Needed | None]) -> Column:
    sizes = [one and one.kv.get(tier, 0) for one in needed]
    return quantity(TIERS[tier].head, sizes, BYTES, hide_zeros=tier != DEVICE)


def _of_full(row: Entry | None) -> float | None:
    """Of the KV bytes that the Full of the row has on its device, which moves none."""
    sizes = [record.kv[DEVICE] for record in row.full.records] if row and row.full else []
    return _total(row) / max(sizes) if row and any(sizes) else None
