"""What a run's own records give away: its warnings, which stand in its summary.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.results.compared import FULL, group_means, mean_score, paired
from harness.results.records import FailedExample, Record
from harness.terminal.notices import SLOW_FP16, alike

NEAR = 0.1  # a Full this close to guessing leaves no room to lose


def warnings(
    records: Sequence[Record],
    full: Sequence[Record] | None,
    *,
    config: Mapping[str, Any],
    info: Mapping[str, Any],
    failed: Sequence[FailedExample] = (),
) -> Iterator[str]:
    """Yield what a reader must know before believing the row of a run."""
    chance = info.get("task_info", {}).get("chance", 0.0)
    yield from info.get("cautions", ())
    for reason, count in alike([example.error for example in failed]):
        tried = len(records) + len(failed)
        yield f"{count} of {tried} examples failed and count nowhere; the same command tries them again: {reason}"
    if not records:
        yield "no example was run"
    elif chance is not None:
        yield from _near_chance(records if info.get("method") == FULL else full or [], chance)
    yield from _about_examples(records)
    if (config.get("device"), config.get("dtype")) == ("cpu", "fp16"):
        yield SLOW_FP16
    if full is not None and (count := len(paired(records, full))) < len(records):
        yield f"compared with Full on {count} of {len(records)} examples: Full has no answer to the other prompts"


def _about_examples(records: Sequence[Record]) -> Iterator[str]:
    n = len(records)
    for reason, count in alike([r.fallback for r in records if r.fallback]):
        yield f"the method fell back on {count} of {n} examples: {reason}"
    counts = {
        "ended before the cache was sealed: the method did nothing there": sum(not r.sealed for r in records),
        "have no TPOT: fewer than 3 tokens": sum(r.tpot_s is None for r in records),
        "were computed anew because their text outgrew a length from which the model rotates all of it otherwise": sum(
            bool(r.recomputed) for r in records
        ),
        "ran into the token limit": sum(any(one.stop == "length" for one in r.replies) for r in records),
    }
    yield from (f"{count} of {n} examples {what}" for what, count in counts.items() if count)
    for warning, count in alike([warning for r in records for warning in r.warnings]):
        yield f"{count} of {n} examples: {warning}"


def at_chance(full: Sequence[Record], chance: float | None) -> bool:
    """Return whether Full itself fails, so that every method looks as good as Full."""
    return chance is not None and bool(full) and mean_score(full) <= chance + NEAR


def _near_chance(full: Sequence[Record], chance: float) -> Iterator[str]:
    means = group_means(full)
    low = [group for group, mean in means.items() if mean <= chance + NEAR]
    if at_chance(full, chance):
        share = 100 * mean_score(full)
        yield f"Full scores {share:.1f}, near the {100 * chance:.0f} of guessing: methods cannot be told apart here"
    elif low:
        yield f"Full is near guessing in {len(low)} of {len(means)} groups: {', '.join(low)}"
