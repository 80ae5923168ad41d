"""What a method costs before and beside its decode steps: preparation, seal, and the peak memory of either phase."""

from __future__ import annotations

from harness.reports.columns import names
from harness.reports.compare import Comparison
from harness.terminal.tables import BYTES, SECONDS, Column, quantity

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


def meaning(comparison: Comparison) -> str:
    """The note below the table."""
    return (
        "prepare: once per model; seal: to digest one prompt, median; peaks: the most memory in use while prompts were "
        "read, and from the seal on; on the device what torch had allocated, on the host all that the process held, "
        "with the model and the caches of methods that share a prefill"
    )
