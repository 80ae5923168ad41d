"""The tables of a report whose rows are runs: the one that a reader sees first, all measurements, and three others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp
from statistics import fmean
from typing import Any

from harness.engine.step_parts import PARTS
from harness.reports.compare import Comparison, ReportRow, asked
from harness.reports.labels import budget
from harness.reports.notes import stamps
from harness.results.measures import MEASURES, Measure, over_known
from harness.terminal.tables import (
    BYTES,
    SECONDS,
    Column,
    counts,
    digits,
    number,
    probability,
    quantities,
    quantity,
    share,
    with_ci,
)
from methods.tiers.tier import DEVICE, TIERS, bytes_key

PEAKS = {  # head -> key of summary.json's `memory`
    "device peak\nprefill": "prefill_device_peak_bytes",
    "device peak\ndecode": "decode_device_peak_bytes",
    "host peak\nprefill": "prefill_host_peak_bytes",
    "host peak\ndecode": "decode_host_peak_bytes",
}


def names(entries: Sequence[ReportRow]) -> list[Column]:
    """Return the two columns that say which run a row is."""
    rows = [entry.summary for entry in entries]
    return [
        Column("method", "", [entry.label for entry in entries], left=True),
        Column("budget", "", [budget(row) for row in rows], values=[asked(row) for row in rows]),
    ]


def overview(table: Comparison) -> list[Column]:
    """Return the first table: score, difference to Full, cost of the right answer, what was read, times, and bytes."""
    entries, rows = table.entries, [entry.summary for entry in table.entries]
    if table.of_perplexity:
        scores = _perplexities(table)
    else:
        cells = [f"{_difference(entry)}{'*' * entry.score_differs}" for entry in entries]
        costs = [entry.cost.get("diff") for entry in entries]
        nats = [f"{signed(cost)}{'*' * entry.cost_differs}" for cost, entry in zip(costs, entries, strict=True)]
        scores = [
            _score("95 % CI", rows),
            Column("vs Full", "95 % CI", cells, values=[(row["full"] or {}).get("diff") for row in rows]),
            Column("NLL\nvs Full", "nats", nats, values=costs),
        ]
    return [
        *names(entries),
        *scores,
        share("attended", [row["budget"]["attended"]["share"] for row in rows]),
        quantity("TT2T", [row["tt2t_s"]["p50"] for row in rows], SECONDS),
        quantity("TPOT", [row["tpot_s"]["p50"] for row in rows], SECONDS),
        *_held_bytes([row["memory"] for row in rows]),
        quantity("moved", [row["memory"]["moved_bytes_per_step"] for row in rows], BYTES, "/step", hide_zeros=True),
    ]


def measurements(table: Comparison) -> list[Column]:
    """Return everything: what it scored on how much evidence, what it read, how fast it was, how many bytes it took."""
    entries, rows = table.entries, [entry.summary for entry in table.entries]
    if table.of_perplexity:
        scores = _perplexities(table)
    else:
        ps = [(row["full"] or {}).get("p") for row in rows]
        starred = [f"{probability(p)}{'*' * entry.score_differs}" for p, entry in zip(ps, entries, strict=True)]
        scores = [
            _score("95% CI", rows),
            Column(
                "vs full",
                "95% CI",
                [_difference(entry) for entry in entries],
                values=[(row["full"] or {}).get("diff") for row in rows],
            ),
            Column("p", "", starred, values=ps),
            _cost_difference(table),
        ]
    fidelity = [row["fidelity"] or {} for row in rows]
    p50, p90 = quantities({key: [row["tpot_s"][key] for row in rows] for key in ("p50", "p90")}, SECONDS)
    both = [f"{a}/{b}" if a else "" for a, b in zip(p50.cells, p90.cells, strict=True)]
    return [
        *names(entries),
        *scores,
        Column("n", "", [num_examples(entry) for entry in entries], values=[row["num_examples"] for row in rows]),
        Column("stamps", "", [stamps(entry, table) for entry in entries], left=True),
        share("attended", [row["budget"]["attended"]["share"] for row in rows]),
        share("read per\nKV head\n(union)", [row["budget"]["union"]["share"] for row in rows]),
        *(share(name, [measured.get(name) for measured in fidelity]) for name in ("recall", "mass")),
        number("KL", "nats", [measured.get("kl") for measured in fidelity]),
        quantity("TTFT", [row["ttft_s"]["p50"] for row in rows], SECONDS),
        quantity("TTFT\nlater", [row["ttft_later_s"]["p50"] for row in rows], SECONDS),
        quantity("TT2T", [row["tt2t_s"]["p50"] for row in rows], SECONDS),
        replace(p50, head="TPOT p50/90", cells=both),
        number("decode", "tok/s", [row["throughput_tok_s"] for row in rows]),
        *_held_bytes([row["memory"] for row in rows]),
        *(
            _measured(measure, [row["memory"].get(key) for row in rows])
            for key, measure in MEASURES.items()
            if measure.head
        ),
        share("read\nof Full's", [_read_of_full(entry) for entry in entries]),
    ]


def likelihoods(table: Comparison) -> list[Column]:
    """Return what the right answers cost; empty where that was not measured, or is the main table's own number."""
    own = [entry.summary["likelihood"] or {} for entry in table.entries]
    if not any(own) or table.of_perplexity:
        return []
    means = [entry.cost.get("mean_diff") for entry in table.entries]
    return [
        *names(table.entries),
        number("NLL", "nats/token", [cost.get("mean") for cost in own]),
        _cost_difference(table),
        Column("mean", "nats", [signed(mean) for mean in means], values=means),
        _cost_p(table),
        counts("n", [cost.get("n") for cost in own]),
    ]


def costs(table: Comparison) -> list[Column]:
    """Return preparation, seal and peak memory; empty where no run says any of it."""
    rows = [entry.summary for entry in table.entries]
    columns = [
        quantity("prepare", [row.get("prepare_s") for row in rows], SECONDS),
        quantity("seal p50", [row["seal_s"]["p50"] for row in rows], SECONDS),
        *(quantity(head, [row["memory"].get(key) for row in rows], BYTES) for head, key in PEAKS.items()),
    ]
    return [] if all(column.empty for column in columns) else [*names(table.entries), *columns]


def step_parts(table: Comparison) -> list[Column]:
    """Return the parts of a decode step's time, a row for each traced run; empty where there is none."""
    traced = [entry for entry in table.entries if entry.summary["trace"]]
    if not traced:
        return []
    parts = {part: [entry.summary["trace"][f"{part}_s"] for entry in traced] for part in ("step", *PARTS)}
    return [*names(traced), *quantities(parts, SECONDS)]


def _score(unit: str, rows: Sequence[Mapping[str, Any]]) -> Column:
    scores = [row["score"] for row in rows]
    return Column("score", unit, [with_ci(s["mean"], s["ci95"]) for s in scores], values=[s["mean"] for s in scores])


def _difference(entry: ReportRow) -> str:
    """Write the difference of a score to Full's in points with its interval."""
    full = entry.summary["full"]
    return with_ci(full["diff"], full["ci95"], sign=True) if full else ""


def _perplexities(table: Comparison) -> list[Column]:
    """Return what stands in place of scores where texts were fed: perplexity, and the difference to Full with its p."""
    means = [(entry.summary["likelihood"] or {}).get("mean") for entry in table.entries]
    values = [None if mean is None else exp(mean) for mean in means]
    return [number("perplexity", "", values), _cost_difference(table), _cost_p(table)]


def _cost_difference(table: Comparison) -> Column:
    """Return by how much more a right answer costs than under Full, with its interval."""
    costs = [entry.cost for entry in table.entries]
    cells = [nats_with_ci(cost) + "*" * row.cost_differs for cost, row in zip(costs, table.entries, strict=True)]
    return Column("NLL vs full", "nats, 95% CI", cells, values=[cost.get("diff") for cost in costs])


def _cost_p(table: Comparison) -> Column:
    values = [entry.cost.get("p") for entry in table.entries]
    cells = [f"{probability(p)}{'*' * row.cost_differs}" for p, row in zip(values, table.entries, strict=True)]
    return Column("p", "", cells, values=values)


def nats_with_ci(cost: Mapping[str, Any]) -> str:
    """Write a difference in nats, followed by its interval."""
    ends = cost.get("ci95")
    return signed(cost.get("diff")) + (f" [{signed(ends[0])}, {signed(ends[1])}]" if ends else "")


def signed(nats: float | None) -> str:
    """Write a difference with its sign; none but 0 reads as 0, so that an interval shows on which side it lies."""
    if not nats:
        return "" if nats is None else "0"
    size = abs(nats)
    return ("-" if nats < 0 else "+") + (digits(size) if size >= 0.001 else f"{size:.0e}")


def _held_bytes(memory: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the bytes held in each tier, in one unit; a tier that holds nothing has no column."""
    sizes = {tier.head: [row.get(bytes_key(name)) for row in memory] for name, tier in TIERS.items()}
    shown = (TIERS[DEVICE].head, *(head for head, some in sizes.items() if any(some)))
    return [column for column in quantities(sizes, BYTES) if column.head in shown]


def _measured(measure: Measure, values: Sequence[float | None]) -> Column:
    assert measure.head
    if measure.unit == "share":
        return share(measure.head, values)
    if measure.unit in ("bytes", "seconds"):
        scale = BYTES if measure.unit == "bytes" else SECONDS
        return quantity(measure.head, values, scale, "/step", hide_zeros=measure.hides_zeros)
    return number(measure.head, measure.unit, values)


def _read_of_full(entry: ReportRow) -> float | None:
    """Return the bytes read, of those that Full read on the same examples; unknown unless both were traced."""
    key = "read_bytes_per_step"
    whole = {record.id: record.measured.get(key) for record in entry.full.records} if entry.full else {}
    pairs = [(record.measured.get(key), whole.get(record.id)) for record in entry.run.records]
    return over_known(fmean, [ours / fulls for ours, fulls in pairs if ours and fulls])


def num_examples(entry: ReportRow) -> str:
    """Write the number of examples, of so many where that is not all."""
    done, expected = entry.summary["num_examples"], entry.run.info.get("num_expected")
    return str(done) if expected in (None, done) else f"{done}/{expected}"
