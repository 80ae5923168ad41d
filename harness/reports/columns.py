"""The cells of a report's tables whose rows are runs, as columns: the first table (`overview`), all
measurements, likelihoods, costs, and parts of a step.

document.py puts these columns together into the text that is printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp
from typing import Any

from harness.engine.step_parts import PARTS
from harness.reports.compare import Comparison, ReportRow, asked
from harness.reports.labels import COUNTS_ANSWER, budget
from harness.reports.notes import stamps
from harness.results.fact import Fact, mean
from harness.results.facts import FACTS
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
NOT_KEPT = "†"  # behind a budget that a run did not keep


def names(entries: Sequence[ReportRow]) -> list[Column]:
    """Return the two columns that name a row: method and budget, with a mark where it was not
    kept."""
    rows = [entry.summary for entry in entries]
    marks = [NOT_KEPT * bool(row["budget"].get("not_kept")) for row in rows]
    budgets = [f"{budget(row)}{mark}" for row, mark in zip(rows, marks, strict=True)]
    return [
        Column("method", "", [entry.label for entry in entries], left=True),
        Column("budget", "", budgets, values=[asked(row) for row in rows]),
    ]


def overview(table: Comparison) -> list[Column]:
    """Return the columns of the first table: score, difference to Full, difference in the cost of
    the right answer, share of the prompt that was read, times, and bytes."""
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
        number("read\nin all", "tokens", _read_in_all(rows)),
        quantity("TT2T", [row["tt2t_s"]["p50"] for row in rows], SECONDS),
        quantity("TPOT", [row["tpot_s"]["p50"] for row in rows], SECONDS),
        *_held_bytes([row["memory"] for row in rows]),
        quantity("moved", [row["memory"]["moved_bytes_per_step"] for row in rows], BYTES, "/step", hide_zeros=True),
    ]


def _read_in_all(rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return how many tokens of prompt and answer a step of each row read, the mean, if the budget
    of one of the rows counts both; else nothing."""
    some = any(row["budget"].get("counts") == COUNTS_ANSWER for row in rows)
    return [row["budget"].get("total_tokens") if some else None for row in rows]


def measurements(table: Comparison) -> list[Column]:
    """Return the columns of the table of all measurements: scores, tokens read, speed, bytes."""
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
            cost_difference(table),
        ]
    fidelity = [row["fidelity"] or {} for row in rows]
    low, high = (share("", [row["budget"]["attended"].get(key) for row in rows]) for key in ("p10", "p90"))
    over_layers = [f"{a}-{b}" if a else "" for a, b in zip(low.cells, high.cells, strict=True)]
    p50, p90 = quantities({key: [row["tpot_s"][key] for row in rows] for key in ("p50", "p90")}, SECONDS)
    both = [f"{a}/{b}" if a else "" for a, b in zip(p50.cells, p90.cells, strict=True)]
    return [
        *names(entries),
        *scores,
        Column("n", "", [num_examples(entry) for entry in entries], values=[row["num_examples"] for row in rows]),
        counts("too long,\nleft out", [row.get("num_skipped") or None for row in rows]),
        counts("cut", [row.get("num_cut") or None for row in rows]),
        Column("stamps", "", [stamps(entry, table) for entry in entries], left=True),
        share("attended", [row["budget"]["attended"]["share"] for row in rows]),
        replace(low, head="by layers\np10-p90", cells=over_layers),
        number("read\nin all", "tokens", _read_in_all(rows)),
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
            _measured(fact, [row["memory"].get(key, row.get(key)) for row in rows])
            for key, fact in FACTS.items()
            if fact.head and not fact.by_turn
        ),
        share("read\nof Full's", [_read_of_full(entry) for entry in entries]),
    ]


def likelihoods(table: Comparison) -> list[Column]:
    """Return the columns on how likely the right answers were; empty if that was not measured, or
    if the first table already consists of it (perplexity)."""
    own = [entry.summary["likelihood"] or {} for entry in table.entries]
    if not any(own) or table.of_perplexity:
        return []
    means = [entry.cost.get("mean_diff") for entry in table.entries]
    return [
        *names(table.entries),
        number("NLL", "nats/token", [cost.get("mean") for cost in own]),
        cost_difference(table),
        Column("mean", "nats", [signed(mean) for mean in means], values=means),
        _cost_p(table),
        counts("n", [cost.get("n") for cost in own]),
    ]


def costs(table: Comparison) -> list[Column]:
    """Return the columns on the seconds of preparing the method, those of the seal (when it digests
    the prompt), and peak memory; empty if no run has these numbers."""
    rows = [entry.summary for entry in table.entries]
    columns = [
        quantity("prepare", [row.get("prepare_s") for row in rows], SECONDS),
        quantity("seal p50", [row["seal_s"]["p50"] for row in rows], SECONDS),
        *(quantity(head, [row["memory"].get(key) for row in rows], BYTES) for head, key in PEAKS.items()),
    ]
    return [] if all(column.empty for column in columns) else [*names(table.entries), *columns]


def step_parts(table: Comparison) -> list[Column]:
    """Return the columns on the parts of a decode step's time, one row per traced run; empty
    without one."""
    traced = [entry for entry in table.entries if entry.summary["trace"]]
    if not traced:
        return []
    parts = {part: [entry.summary["trace"][f"{part}_s"] for entry in traced] for part in ("step", *PARTS)}
    return [*names(traced), *quantities(parts, SECONDS)]


def _score(unit: str, rows: Sequence[Mapping[str, Any]]) -> Column:
    scores = [row["score"] for row in rows]
    return Column("score", unit, [with_ci(s["mean"], s["ci95"]) for s in scores], values=[s["mean"] for s in scores])


def _difference(entry: ReportRow) -> str:
    """Return the difference between a row's score and Full's as text, in points, with its
    interval."""
    full = entry.summary["full"]
    return with_ci(full["diff"], full["ci95"], sign=True) if full else ""


def _perplexities(table: Comparison) -> list[Column]:
    """Return the columns that replace scores if texts were fed by force: perplexity, and the
    difference to Full with its p."""
    means = [(entry.summary["likelihood"] or {}).get("mean") for entry in table.entries]
    values = [None if mean is None else exp(mean) for mean in means]
    return [number("perplexity", "", values), cost_difference(table), _cost_p(table)]


def cost_difference(table: Comparison) -> Column:
    """Return a column with the difference in the negative log-likelihood (cost) of right answers
    between each row and Full."""
    costs = [entry.cost for entry in table.entries]
    cells = [nats_with_ci(cost) + "*" * row.cost_differs for cost, row in zip(costs, table.entries, strict=True)]
    return Column("NLL vs full", "nats, 95% CI", cells, values=[cost.get("diff") for cost in costs])


def _cost_p(table: Comparison) -> Column:
    values = [entry.cost.get("p") for entry in table.entries]
    cells = [f"{probability(p)}{'*' * row.cost_differs}" for p, row in zip(values, table.entries, strict=True)]
    return Column("p", "", cells, values=values)


def nats_with_ci(cost: Mapping[str, Any]) -> str:
    """Return a difference of likelihoods (`cost`) as text, in nats, followed by its interval."""
    ends = cost.get("ci95")
    return signed(cost.get("diff")) + (f" [{signed(ends[0])}, {signed(ends[1])}]" if ends else "")


def signed(nats: float | None) -> str:
    """Return a difference as text with its sign. Only an exact 0 reads as 0, so that the end of an
    interval shows on which side of 0 it lies."""
    if not nats:
        return "" if nats is None else "0"
    size = abs(nats)
    return ("-" if nats < 0 else "+") + (digits(size) if size >= 0.001 else f"{size:.0e}")


def _held_bytes(memory: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return a column for each tier with the bytes held there, all in one unit. A tier that holds
    nothing in any row has no column, except the device."""
    sizes = {tier.head: [row.get(bytes_key(name)) for row in memory] for name, tier in TIERS.items()}
    shown = (TIERS[DEVICE].head, *(head for head, some in sizes.items() if any(some)))
    return [column for column in quantities(sizes, BYTES) if column.head in shown]


def _measured(fact: Fact, values: Sequence[float | None]) -> Column:
    assert fact.head
    if fact.unit == "share":
        return share(fact.head, values)
    if fact.unit in ("bytes", "seconds"):
        scale, each = BYTES if fact.unit == "bytes" else SECONDS, "/step" * (fact.per == "step")
        return quantity(fact.head, values, scale, each, hide_zeros=fact.hides_zeros)
    return number(fact.head, fact.unit, values)


def _read_of_full(entry: ReportRow) -> float | None:
    """Return the bytes that a step read as a share of what Full's step read on the same examples;
    None unless both runs were traced."""
    key = "read_bytes_per_step"
    whole = {record.id: record[key] for record in entry.full.records} if entry.full else {}
    pairs = [(record[key], whole.get(record.id)) for record in entry.run.records]
    return mean([ours / fulls for ours, fulls in pairs if ours and fulls])


def num_examples(entry: ReportRow) -> str:
    """Return the number of examples as text; "3/10" if the run is not complete."""
    done, expected = entry.summary["num_examples"], entry.run.info.get("num_expected")
    return str(done) if expected in (None, done) else f"{done}/{expected}"
