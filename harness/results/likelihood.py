"""The section of summary.json on how likely a run makes the right answers, and how that differs from Full."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from evals import signed_rank
from harness.results.compared import paired
from harness.results.records import Record

KEY = "answer_nll"  # of a record's measured numbers: nats per token
MIN_WINDOWS = 24  # windows of a text below which nothing is said of how sure their difference is


def cost_of(record: Record) -> float | None:
    """Return what the right answer costs; where it was fed in place of an answer, what that says."""
    return record.details.get("nll") if record.stop == "forced" else record.measured.get(KEY)


def likelihood(records: Sequence[Record], full: Sequence[Record] | None) -> dict[str, Any] | None:
    """Return `n` examples with a cost, the `mean` over groups of their mean costs, these by group, and beside `full`
    the paired comparison; None where no example has a cost. All in nats per token.

    `diff`, `ci95` and `p` are the signed-rank test's (evals/signed_rank.py), `mean_diff` the mean of the differences.
    Of fewer than `MIN_WINDOWS` windows of a text there is neither interval nor p.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if (cost := cost_of(record)) is not None:
            groups[record.group].append(cost)
    if not groups:
        return None
    by_group = {group: {"mean": fmean(costs), "n": len(costs)} for group, costs in groups.items()}
    mean = fmean(group["mean"] for group in by_group.values())
    return {"n": sum(map(len, groups.values())), "mean": mean, "groups": by_group, "full": _beside(records, full or [])}


def _beside(records: Sequence[Record], full: Sequence[Record]) -> dict[str, Any] | None:
    """Return the comparison over the examples of which both runs have a cost; None where there is none."""
    found = [
        (cost, fulls, record.independent)
        for record, other in paired(records, full)
        if (cost := cost_of(record)) is not None and (fulls := cost_of(other)) is not None
    ]
    if not found:
        return None
    costs, baseline, units = zip(*found, strict=True)
    shift = signed_rank.shift(costs, baseline, units)
    enough = shift.n >= MIN_WINDOWS or records[0].stop != "forced"
    ends = [shift.ci.low, shift.ci.high] if shift.ci and enough else None
    return {"n": shift.n, "mean_diff": shift.mean, "diff": shift.diff, "ci95": ends, "p": shift.p if enough else None}
