"""A plan as a table, as a picture, and as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.machines.plan import BYTES_ALONE, PlannedRow
from harness.terminal.tables import BYTES, Column, counts, number, quantity

MEANING = {
    "published": "fitted to published points of this method on this machine",
    "measured": "measured on this machine",
    "extrapolated": "carried over from another machine, or from another placement, that has published points",
    BYTES_ALONE: "no time of this method is known there. Launches, Python and arithmetic come on top, and rows that a "
    "step finds on the device are not taken off, but where --hits says how many",
}

TT2T = "TT2T: of one prompt by itself, at full speed. What a method computes at its seal, as clusters, comes on top."


def columns(rows: Sequence[PlannedRow]) -> list[Column]:
    """Columns that say the same in every row are left out, if they are among what was asked for."""
    asked = {
        "machine": [row.machine.name for row in rows],
        "tokens": [str(row.load.tokens) for row in rows],
        "method": [row.load.name for row in rows],
        "budget": [str(row.load.budget) if row.load.method.uses_budget else "-" for row in rows],
        "placement": [row.load.placement for row in rows],
    }
    shown = [
        Column(head, "", cells, left=True) for head, cells in asked.items() if head == "method" or len(set(cells)) > 1
    ]
    return [
        *shown,
        counts("batch", [row.batch for row in rows]),
        Column("until", "", [row.limit for row in rows], left=True),
        number("TT2T", "s", [row.tt2t_s for row in rows]),
        number("TPOT", "ms", [1e3 * row.tpot_s for row in rows]),
        number("rate", "tok/s", [row.rate for row in rows]),
        number("bytes alone", "tok/s", [row.bytes_rate for row in rows]),
        Column("trust", "", [row.basis for row in rows], left=True),
        quantity("on device", [row.sequence.device for row in rows], BYTES, "/seq"),
        quantity("in host", [row.sequence.host for row in rows], BYTES, "/seq", hide_zeros=True),
        quantity("passing", [row.sequence.passing for row in rows], BYTES),
    ]


def notes(rows: Sequence[PlannedRow]) -> list[str]:
    """What the words of the column `trust` mean that are in the table, how much host memory its rows take where nobody
    limits it, and where the machines' facts come from."""
    found = {row.basis for row in rows}
    words = [f"{word}: {meaning}." for word, meaning in MEANING.items() if word in found]
    if any(row.tt2t_s is not None for row in rows):
        words.append(TT2T)
    most = max((row.batch * row.sequence.host for row in rows if row.machine.host_bytes is None), default=0)
    if most:
        words.append(
            f"Host memory is not limited here, and rows take up to {most / 2**40:.3g} TiB: --host 512GB limits it."
        )
    return [*words, *dict.fromkeys(f"{row.machine.name}: {row.machine.source}." for row in rows)]


def plain(row: PlannedRow) -> Mapping[str, Any]:
    load, sequence = row.load, row.sequence
    return {
        "machine": row.machine.name,
        "method": load.name,
        "budget": load.budget if load.method.uses_budget else None,
        "placement": load.placement,
        "tokens": load.tokens,
        "new": load.new,
        "batch": row.batch,
        "largest_batch": row.most,
        "limit": row.limit,
        "tt2t_s": row.tt2t_s,
        "tpot_s": row.tpot_s,
        "bytes_tpot_s": row.bytes_tpot_s,
        "throughput_tok_s": row.rate,
        "basis": row.basis,
        "kv_device_bytes": sequence.device,
        "rounding_bytes": sequence.rounding,
        "kv_host_bytes": sequence.host,
        "passing_bytes": sequence.passing,
        "staged_bytes": sequence.staged,
    }


def picture(file: Path, rows: Sequence[PlannedRow], title: str) -> None:
    """A bar for each row: its rate, by bytes alone in a lighter colour behind it, and its batch. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places, named = range(len(rows)), [column for column in columns(rows) if column.left and column.head != "trust"]
    labels = [" ".join(column.cells[place] for column in named if column.head != "until") for place in places]
    axes.barh(places, [row.bytes_rate for row in rows], color="#cfe8f7", label="by bytes alone")
    sure = [row.rate if row.basis != BYTES_ALONE else 0.0 for row in rows]
    axes.barh(places, sure, height=0.5, color="#0072b2", label="with what was fitted of the method")
    for place, row in zip(places, rows, strict=True):
        axes.annotate(f" batch {row.batch}", (row.bytes_rate, place), va="center", fontsize=7)
    axes.set_yticks(places, labels, fontsize=7)
    axes.invert_yaxis()
    slowest, fastest = (pick(row.bytes_rate for row in rows) for pick in (min, max))
    axes.set(xlabel="tokens per second of all sequences together", title=title)
    axes.set(xscale="log", xlim=(slowest / 2, 4 * fastest))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(fontsize=7, loc="lower right")
    figure.savefig(file, dpi=100)
