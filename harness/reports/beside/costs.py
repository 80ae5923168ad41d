"""What a method costs: preparation, seal, the peak memory of either phase, and where the time of a decode step goes."""

from __future__ import annotations

from dataclasses import replace

from harness.engine.step_parts import PARTS
from harness.reports.columns import names
from harness.reports.compare import Comparison
from harness.terminal.tables import BYTES, SECONDS, Column, quantity, scaled

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
    """Where the time of a decode step goes; empty where no run was traced."""
    traced = [entry for entry in comparison.entries if entry.summary["trace"]]
    if not traced:
        return []
    parts = ("step", *PARTS)
    found = [entry.summary["trace"][f"{part}_s"] for entry in traced for part in parts]
    cells, unit = scaled(found, SECONDS)
    head, asked_for = names(traced)
    return [
        replace(head, head="decode step"),
        asked_for,
        *(
            Column(part, unit, cells[place :: len(parts)], values=found[place :: len(parts)])
            for place, part in enumerate(parts)
        ),
    ]


def meaning(comparison: Comparison) -> str:
    """The note below the table."""
    return (
        "prepare: once per model; seal: to digest one prompt, median; peaks: the most memory in use while prompts were "
        "read, and from the seal on; on the device what torch had allocated, on the host all that the process held, "
        "with the model and the caches of methods that share a prefill"
    )
