"""What a method costs, and its score against that.

Preparation, seal, the peak memory of either phase, the parts of a decode step, and which rows no other row beats. The
costs and colours of `PANELS` are the same in every picture and on the page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.engine.step_parts import PARTS
from harness.reports.columns import names
from harness.reports.compare import Comparison
from harness.results.compared import FULL
from harness.results.measures import over_known
from harness.terminal.tables import BYTES, SECONDS, Column, quantities, quantity
from methods.tiers.tier import TIERS, bytes_key

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


def front(points: Sequence[tuple[float, float] | None]) -> set[int]:
    """Places of the (cost, score) that no other beats: none costs as little and scores more, or costs less and scores
    as much."""
    known = [(i, point) for i, point in enumerate(points) if point is not None]
    return {i for i, (cost, score) in known if not any(_beats(other, (cost, score)) for _, other in known)}


def _beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] <= b[0] and a[1] >= b[1] and a != b


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
