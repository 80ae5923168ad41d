"""The cells of a report's tables whose rows are runs, as columns: the first table (`overview`), all
measurements, likelihoods, costs, and parts of a step.

document.py puts these columns together into the text that is printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
BY_LAYERS = ("budget.attended.p10", "budget.attended.p90")
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
    entries = table.entries
    rows = [entry.summary for entry in entries]
    if table.of_perplexity:
        scores = _perplexities(table)
    else:
        differences = starred(map(_difference, entries), entries)
        costs = [entry.cost.get("diff") for entry in entries]
        nats = starred(map(signed, costs), entries, of_cost=True)
        scores = [
            _score("95 % CI", rows),
            Column("vs Full", "95 % CI", differences, values=each(rows, "full.diff")),
            Column("NLL\nvs Full", "nats", nats, values=costs),
        ]
    return [
        *names(entries),
        *scores,
        share("attended", each(rows, "budget.attended.share")),
        number("read\nin all", "tokens", _read_in_all(rows)),
        quantity("TT2T", each(rows, "tt2t_s.p50"), SECONDS),
        quantity("TPOT", each(rows, "tpot_s.p50"), SECONDS),
        *_held_bytes(rows),
        quantity(
            "moved", each(rows, "memory.moved_bytes_per_step"), BYTES, "/step", hide_zeros=True
        ),
    ]


def each(rows: Sequence[Mapping[str, Any]], path: str) -> list[Any]:
    """Return the value at a path such as "budget.union.share" of each summary; None where one has none."""
    values: list[Any] = list(rows)
    for key in path.split("."):
        values = [value.get(key) if value else None for value in values]
    return values


def starred(cells: Iterable[str], entries: Sequence[ReportRow], of_cost: bool = False) -> list[str]:
    """Return the cells with a star behind those of rows whose score, or likelihood (`of_cost`), differs from Full's."""
    return [
        cell + "*" * (entry.cost_differs if of_cost else entry.score_differs)
        for cell, entry in zip(cells, entries, strict=True)
    ]


def _read_in_all(rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return, for each row, the mean number of tokens of prompt and answer that a step read, if the
    budget of one of the rows counts both; otherwise None for each."""
    some = any(row["budget"].get("counts") == COUNTS_ANSWER for row in rows)
    return [row["budget"].get("total_tokens") if some else None for row in rows]


def measurements(table: Comparison) -> list[Column]:
    """Return the columns of the table of all measurements: scores, tokens read, speed, bytes."""
    entries = table.entries
    rows = [entry.summary for entry in entries]
    times = {key: each(rows, f"tpot_s.{key}") for key in ("p50", "p90")}
    if table.of_perplexity:
        scores = _perplexities(table)
    else:
        ps = each(rows, "full.p")
        differences = list(map(_difference, entries))
        scores = [
            _score("95% CI", rows),
            Column("vs full", "95% CI", differences, values=each(rows, "full.diff")),
            Column("p", "", starred(map(probability, ps), entries), values=ps),
            cost_difference(table),
        ]
    return [
        *names(entries),
        *scores,
        Column("n", "", list(map(num_examples, entries)), values=each(rows, "num_examples")),
        counts("too long,\nleft out", [count or None for count in each(rows, "num_skipped")]),
        counts("cut", [count or None for count in each(rows, "num_cut")]),
        Column("stamps", "", [stamps(entry, table) for entry in entries], left=True),
        share("attended", each(rows, "budget.attended.share")),
        _pair("by layers\np10-p90", "-", [share("", each(rows, path)) for path in BY_LAYERS]),
        number("read\nin all", "tokens", _read_in_all(rows)),
        share("read per\nKV head\n(union)", each(rows, "budget.union.share")),
        share("recall", each(rows, "fidelity.recall")),
        share("mass", each(rows, "fidelity.mass")),
        number("KL", "nats", each(rows, "fidelity.kl")),
        quantity("TTFT", each(rows, "ttft_s.p50"), SECONDS),
        quantity("TTFT\nlater", each(rows, "ttft_later_s.p50"), SECONDS),
        quantity("TT2T", each(rows, "tt2t_s.p50"), SECONDS),
        _pair("TPOT p50/90", "/", quantities(times, SECONDS)),
        number("decode", "tok/s", each(rows, "throughput_tok_s")),
        *_held_bytes(rows),
        *(
            _measured(fact, [row["memory"].get(key, row.get(key)) for row in rows])
            for key, fact in FACTS.items()
            if fact.head and not fact.by_turn
        ),
        share("read\nof Full's", list(map(_read_of_full, entries))),
    ]


def _pair(head: str, sign: str, both: Sequence[Column]) -> Column:
    """Join two columns in one; where a cell of the first is empty, the joint cell is empty too."""
    one, other = both
    cells = [a and f"{a}{sign}{b}" for a, b in zip(one.cells, other.cells, strict=True)]
    return replace(one, head=head, cells=cells)


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
        quantity("prepare", each(rows, "prepare_s"), SECONDS),
        quantity("seal p50", each(rows, "seal_s.p50"), SECONDS),
        *(quantity(head, each(rows, f"memory.{key}"), BYTES) for head, key in PEAKS.items()),
    ]
    if all(column.empty for column in columns):
        return []
    return [*names(table.entries), *columns]


def step_parts(table: Comparison) -> list[Column]:
    """Return the columns on the parts of a decode step's time, one row per traced run; empty
    without one."""
    traced = [entry for entry in table.entries if entry.summary["trace"]]
    if not traced:
        return []
    rows = [entry.summary for entry in traced]
    parts = {part: each(rows, f"trace.{part}_s") for part in ("step", *PARTS)}
    return [*names(traced), *quantities(parts, SECONDS)]


def _score(unit: str, rows: Sequence[Mapping[str, Any]]) -> Column:
    means = each(rows, "score.mean")
    cells = list(map(with_ci, means, each(rows, "score.ci95")))
    return Column("score", unit, cells, values=means)


def _difference(entry: ReportRow) -> str:
    """Return the difference between a row's score and Full's as text, in points, with its
    interval."""
    full = entry.summary["full"]
    return with_ci(full["diff"], full["ci95"], sign=True) if full else ""


def _perplexities(table: Comparison) -> list[Column]:
    """Return the columns that replace scores if texts were fed by force: perplexity, and the
    difference to Full with its p."""
    means = each([entry.summary for entry in table.entries], "likelihood.mean")
    values = [None if mean is None else exp(mean) for mean in means]
    return [number("perplexity", "", values), cost_difference(table), _cost_p(table)]


def cost_difference(table: Comparison) -> Column:
    """Return a column with the difference in the negative log-likelihood (cost) of right answers
    between each row and Full."""
    costs = [entry.cost for entry in table.entries]
    cells = starred(map(nats_with_ci, costs), table.entries, of_cost=True)
    return Column("NLL vs full", "nats, 95% CI", cells, values=[cost.get("diff") for cost in costs])


def _cost_p(table: Comparison) -> Column:
    values = [entry.cost.get("p") for entry in table.entries]
    cells = starred(map(probability, values), table.entries, of_cost=True)
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


def _held_bytes(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return a column for each tier with the bytes held there, all in one unit. A tier that holds
    nothing in any row has no column, except the device."""
    sizes = {tier.head: each(rows, f"memory.{bytes_key(name)}") for name, tier in TIERS.items()}
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
    of_full = entry.full.records if entry.full else []
    whole = {record.id: record[key] for record in of_full}
    pairs = [(record[key], whole.get(record.id)) for record in entry.run.records]
    return mean([ours / fulls for ours, fulls in pairs if ours and fulls])


def num_examples(entry: ReportRow) -> str:
    """Return the number of examples as text; "3/10" if the run is not complete."""
    done = entry.summary["num_examples"]
    expected = entry.run.info.get("num_expected")
    return str(done) if expected in (None, done) else f"{done}/{expected}"
