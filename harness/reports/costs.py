"""What a method costs, and its score against that.

Preparation, seal, the peak memory of either phase, and where the time of a decode step goes; which rows nothing beats,
and the bytes that stay within a point of Full. The costs and colours of `PANELS` are the same in every picture and on
the page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from harness.engine.step_parts import PARTS
from harness.reports.columns import difference, names
from harness.reports.compare import Comparison, ReportRow
from harness.reports.labels import budget
from harness.results.alarms.run import at_chance
from harness.results.compared import FULL
from harness.results.measures import over_known
from harness.results.run_folder import StoredRun
from harness.results.summary_file import method_of
from harness.terminal.tables import BYTES, SECONDS, Column, counts, quantities, quantity, share
from methods.tiers.tier import DEVICE, TIERS, bytes_key

PEAKS = {  # head -> key of summary.json's `memory`
    "device peak\nprefill": "prefill_device_peak_bytes",
    "device peak\ndecode": "decode_device_peak_bytes",
    "host peak\nprefill": "prefill_host_peak_bytes",
    "host peak\ndecode": "decode_host_peak_bytes",
}


def cost_table(comparison: Comparison) -> list[Column]:
    """Empty where no run says any of it (older runs know no peak per phase, simulated ones no time)."""
    rows = [entry.summary for entry in comparison.entries]
    costs = [
        quantity("prepare", [row.get("prepare_s") for row in rows], SECONDS),
        quantity("seal p50", [row["seal_s"]["p50"] for row in rows], SECONDS),
        *(quantity(head, [row["memory"].get(key) for row in rows], BYTES) for head, key in PEAKS.items()),
    ]
    return [] if all(column.empty for column in costs) else [*names(comparison.entries), *costs]


def trace_table(comparison: Comparison) -> list[Column]:
    """Return the parts of a decode step's time; empty where no run was traced."""
    traced = [entry for entry in comparison.entries if entry.summary["trace"]]
    if not traced:
        return []
    head, asked_for = names(traced)
    parts = {part: [entry.summary["trace"][f"{part}_s"] for entry in traced] for part in ("step", *PARTS)}
    return [replace(head, head="decode step"), asked_for, *quantities(parts, SECONDS)]


def meaning(comparison: Comparison) -> str:
    """The note below the table."""
    return (
        "prepare: once per model; seal: to digest one prompt, median; peaks: the most memory in use while prompts were "
        "read, and from the seal on; on the device what torch had allocated, on the host all that the process held, "
        "with the model and the caches of methods that share a prefill"
    )


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
        """Return the bytes that a step needs on the device: those that lie there and those that are moved there."""
        return self.kv[DEVICE] + self.moved


def front(points: Sequence[tuple[float, float] | None]) -> set[int]:
    """Places of the (cost, score) that no other beats: none costs as little and scores more, or costs less and scores
    as much."""
    known = [(i, point) for i, point in enumerate(points) if point is not None]
    return {i for i, (cost, score) in known if not any(_beats(other, (cost, score)) for _, other in known)}


def _beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] <= b[0] and a[1] >= b[1] and a != b


def needed(entry: ReportRow) -> Needed | None:
    """Return the bytes that the most demanding example needs; None where no example says what it moved."""
    replies = [reply for record in entry.run.records for reply in record.replies]
    moved = [(reply.kv, reply.measured.get("moved_bytes_per_step")) for reply in replies]
    known = [Needed(held, bytes_) for held, bytes_ in moved if bytes_ is not None]
    return max(known, key=lambda one: one.total, default=None)


def within(comparison: Comparison) -> dict[str, ReportRow | None]:
    """Return, by the label of a method, its row with the fewest bytes within a point of Full, or None. Rows
    that are not complete are no evidence, nor are those whose Full does no better than guessing."""
    rows: dict[str, list[ReportRow]] = defaultdict(list)
    for entry in comparison.entries:
        known = entry.summary["full"] and entry.summary["status"] == "complete" and needed(entry) is not None
        if method_of(entry.run) != FULL and known and not _guesses(entry.full):
            rows[entry.label].append(entry)
    close = {label: [e for e in some if e.summary["full"]["diff"] >= -CLOSE] for label, some in rows.items()}
    return {label: min(some, key=_total, default=None) for label, some in close.items()}


def _total(entry: ReportRow) -> float:
    """inf where it is not known"""
    found = needed(entry)
    return inf if found is None else found.total


def _guesses(full: StoredRun | None) -> bool:
    return full is not None and at_chance(full.records, full.info.get("task_info", {}).get("chance", 0.0))


def within_table(comparison: Comparison) -> list[Column]:
    """`MEANING`, fewest bytes first; empty where nothing is held against Full."""
    found = within(comparison)
    best = sorted(found.items(), key=lambda pair: (_total(pair[1]) if pair[1] else inf, pair[0]))
    if not best or comparison.of_perplexity:
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


def _of_full(row: ReportRow | None) -> float | None:
    """Return the share of the KV bytes that the row's Full holds on its device."""
    sizes = [record.kv[DEVICE] for record in row.full.records] if row and row.full else []
    return _total(row) / max(sizes) if row and any(sizes) else None


LOAD = "L"  # the stamp of such times
SummaryRow = Mapping[str, Any]  # a summary, with `label` naming its line, and its `stamps`

# Twelve that differ for normal and for colour-blind eyes (after M. Krzywinski, mk.bcgsc.ca/colorblind); Full is black,
# and grey is for what is within the noise.
COLOURS = (
    "#008df9", "#e20134", "#009f81", "#ff6e3a", "#8400cd", "#ffc33b",
    "#ff5aaf", "#00c2f9", "#9f0162", "#00d302", "#a0522d", "#7a7a00",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Panel:
    """Describes one cost that the score is drawn against; rows without it, or where it is 0, are not drawn. `timed`: a
    time, which says something only beside Full's, and little of a machine that others used."""

    name: str
    cost: Callable[[SummaryRow], float | None]
    log: bool = False
    timed: bool = False

    def shows(self, rows: Sequence[SummaryRow]) -> bool:
        """Return whether a method other than Full has the cost and a score, and Full too where it is wanted."""
        priced = [row["method"] == FULL for row in rows if row["score"]["mean"] is not None and self.cost(row)]
        lacks_full = self.timed and not any(priced) and any(row["method"] == FULL for row in rows)
        return not all(priced) and not lacks_full

    def title(self, rows: Sequence[SummaryRow]) -> str:
        """Its name, and below it how many points are times of a machine that others used."""
        doubtful = [LOAD in row.get("stamps", "") for row in rows if self.timed and self.cost(row)]
        caution = f"\n{LOAD}: others used the machine for {sum(doubtful)} of {len(doubtful)} points"
        return self.name + caution * any(doubtful)

    def points(self, rows: Sequence[SummaryRow]) -> dict[str, list[tuple[float, SummaryRow]]]:
        lines: dict[str, list[tuple[float, SummaryRow]]] = defaultdict(list)
        for row in rows:
            if row["score"]["mean"] is not None and (x := self.cost(row)):
                lines[row["label"]].append((x, row))
        return {label: sorted(points, key=lambda point: point[0]) for label, points in lines.items()}


def _read(row: SummaryRow) -> float | None:
    """Percent of the prompt: over all query heads of a KV head, where that was counted."""
    share = row["budget"]["union"]["share"] or row["budget"]["attended"]["share"]
    return _scaled(share, 100)


def _held_bytes(row: SummaryRow) -> float | None:
    """Return the bytes held in all tiers: a method that holds little on the device may hold more than Full on the
    host."""
    sizes = [row["memory"].get(bytes_key(tier)) for tier in TIERS]
    return over_known(sum, sizes)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


PANELS = (
    Panel("prompt tokens a KV head reads per step (%)", _read, log=True),
    Panel("keys, values and indices held in all tiers, largest (MiB)", lambda row: _scaled(_held_bytes(row), 2**-20)),
    Panel(
        "bytes moved between tiers per step, mean (MiB)",
        lambda row: _scaled(row["memory"]["moved_bytes_per_step"], 2**-20),
    ),
    Panel("median time per output token (ms)", lambda row: _scaled(row["tpot_s"]["p50"], 1000), timed=True),
)
