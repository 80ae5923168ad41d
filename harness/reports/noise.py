"""The noise floor: by how much Full differs from itself where nothing but the arithmetic changes.

Full on the same prompts with another dtype, batch, device, backend or number of threads is the same method: whatever
its score or its likelihood changes by is no method's doing. Such A/A runs are the rows of Full in one table, beside
each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from evals.stats import ALPHA
from harness.reports.compare import Comparison, ReportRow
from harness.results.compared import FULL, paired, round_alike
from harness.results.likelihood import likelihood
from harness.results.summary import against
from harness.results.summary_file import method_of


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs of Full on the same prompts."""

    names: tuple[str, str]
    diff: float  # of the mean scores, 0-1
    ci95: tuple[float, float]
    n: int
    changed: int  # answers that are not the same
    nats: Mapping[str, Any] | None  # what the right answer costs more, as `harness.results.likelihood` compares it


def pairs(comparison: Comparison) -> list[Pair]:
    """Every two rows of Full that differ in something that rounding depends on; two that do not measure nothing."""
    full = [entry for entry in comparison.entries if method_of(entry.run) == FULL and entry.run.records]
    return [pair for a, b in combinations(full, 2) for pair in _pair(a, b)]


def _pair(a: ReportRow, b: ReportRow) -> Iterator[Pair]:
    shared, beside = paired(a.run.records, b.run.records), against(a.run.records, b.run.records)
    changed = sum(ours.answer != theirs.answer for ours, theirs in shared)
    if beside and not round_alike(a.run, b.run):
        cost = likelihood(a.run.records, b.run.records)
        nats = cost["full"] if cost else None
        yield Pair((a.title, b.title), beside["diff"], tuple(beside["ci95"]), len(shared), changed, nats)


def floor(found: list[Pair]) -> float | None:
    """The largest difference of Full from itself; null without an A/A run."""
    return max((abs(pair.diff) for pair in found), default=None)


def within_noise(beside: Mapping[str, Any] | None, least: float | None) -> bool:
    """Whether a row's difference to Full (`Comparison.beside`) may be nothing: its test does not hold, or Full differs
    from itself by as much."""
    return beside is not None and (beside["p"] >= ALPHA or (least is not None and abs(beside["diff"]) <= least))


def sentence(found: list[Pair]) -> str:
    """What a reader is told of the floor."""
    if not found:
        return (
            "noise floor: unknown, for no two runs of Full differ in dtype, batch, device or machine; run Full again "
            "with another to see what arithmetic alone changes"
        )
    largest = max(found, key=lambda pair: abs(pair.diff))
    low, high = (100 * end for end in largest.ci95)
    return (
        f"noise floor: {100 * abs(largest.diff):.1f} points, the largest difference of Full from itself over "
        f"{len(found)} A/A pair{'s' * (len(found) > 1)}: {largest.names[0]} against {largest.names[1]}, "
        f"95 % CI [{low:+.1f}, {high:+.1f}], n = {largest.n}, {largest.changed} answers changed{_cost(found)}"
    )


def _cost(found: list[Pair]) -> str:
    """What arithmetic changes of a likelihood: of the pair whose typical difference is largest."""
    known = [(pair.names, pair.nats) for pair in found if pair.nats]
    if not known:
        return ""
    names, nats = max(known, key=lambda of: abs(of[1]["diff"]))
    ends = "95 % CI [{:+.4f}, {:+.4f}], ".format(*nats["ci95"]) if nats["ci95"] else ""
    return f"; of its likelihood {nats['diff']:+.4f} nats per token: {' against '.join(names)}, {ends}n = {nats['n']}"
