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


def likelihood(records: Sequence[Record], full: Sequence[Record] | None) -> dict[str, Any] | None:
    """Return `n` examples with a cost, the `mean` over groups of their mean costs, and beside `full` the paired
    comparison; None where no example has a cost. All in nats per token.

    `diff`, `ci95` and `p` are the signed-rank test's (evals/signed_rank.py), `mean_diff` the mean of the differences.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if (cost := record.measured.get(KEY)) is not None:
            groups[record.group].append(cost)
    if not groups:
        return None
    mean = fmean(fmean(costs) for costs in groups.values())
    return {"n": sum(map(len, groups.values())), "mean": mean, "full": _beside(records, full or [])}


def _beside(records: Sequence[Record], full: Sequence[Record]) -> dict[str, Any] | None:
    """Return the comparison over the examples of which both runs have a cost; None where there is none."""
    found = [
        (cost, fulls, record.independent)
        for record, other in paired(records, full)
        if (cost := record.measured.get(KEY)) is not None and (fulls := other.measured.get(KEY)) is not None
    ]
    if not found:
        return None
    costs, baseline, units = zip(*found, strict=True)
    shift = signed_rank.shift(costs, baseline, units)
    ends = [shift.ci.low, shift.ci.high] if shift.ci else None
    return {"n": shift.n, "mean_diff": shift.mean, "diff": shift.diff, "ci95": ends, "p": shift.p}
