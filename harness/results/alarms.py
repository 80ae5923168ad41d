"""Every alarm there is: what a run's own records give away, alone, beside Full, and beside other methods."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from evals.stats import ALPHA
from harness.results.pairs import group_means, paired
from harness.results.records import Record
from harness.terminal.notices import SLOW_FP16

MIN_WRONG_TOKENS = 100  # tokens of answers that are not fully right
NEAR = 0.1  # a Full this close to guessing leaves no room to lose


def warnings(
    records: Sequence[Record],
    full: Sequence[Record] | None,
    beside: Mapping[str, Any] | None,
    *,
    config: Mapping[str, Any],
    info: Mapping[str, Any],
) -> Iterator[str]:
    """What a reader must know before believing the row of a run. `beside`: the comparison with Full, as in
    summary.json."""
    chance = info.get("task_info", {}).get("chance", 0.0)
    if not records:
        yield "no example was run"
    elif chance is not None:
        yield from _near_chance(records if info.get("method") == "full" else full or [], chance)
    yield from _about_examples(records)
    if (config.get("device"), config.get("dtype")) == ("cpu", "fp16"):
        yield SLOW_FP16
    yield from _beside_full(records, full, beside)


def _about_examples(records: Sequence[Record]) -> Iterator[str]:
    n = len(records)
    for reason, count in Counter(r.fallback for r in records if r.fallback).items():
        yield f"the method fell back on {count} of {n} examples: {reason}"
    counts = {
        "ended before the cache was sealed: the method did nothing there": sum(not r.sealed for r in records),
        "have no TPOT: fewer than 3 tokens": sum(r.tpot_s is None for r in records),
        "ran into the token limit": sum(r.stop == "length" for r in records),
    }
    yield from (f"{count} of {n} examples {what}" for what, count in counts.items() if count)
    for warning, count in _alike([warning for r in records for warning in r.warnings]):
        yield f"{count} of {n} examples: {warning}"


def _alike(warnings: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Warnings that differ in their numbers alone as one, with the span of each number."""
    kinds: dict[tuple[str, ...], list[list[int]]] = defaultdict(list)
    for warning in warnings:
        words = tuple(re.split(r"\d+", warning))
        kinds[words].append([int(number) for number in re.findall(r"\d+", warning)])
    for words, numbers in kinds.items():
        spans = [" to ".join(map(str, sorted({min(column), max(column)}))) for column in zip(*numbers, strict=True)]
        yield "".join(chain.from_iterable(zip(words, [*spans, ""], strict=True))), len(numbers)


def _near_chance(full: Sequence[Record], chance: float) -> Iterator[str]:
    """Where Full itself fails, every method looks as good as Full."""
    means = group_means(full)
    low = [group for group, mean in means.items() if mean <= chance + NEAR]
    if means and fmean(means.values()) <= chance + NEAR:
        share = 100 * fmean(means.values())
        yield f"Full scores {share:.1f}, near the {100 * chance:.0f} of guessing: methods cannot be told apart here"
    elif low:
        yield f"Full is near guessing in {len(low)} of {len(means)} groups: {', '.join(low)}"


def _beside_full(
    records: Sequence[Record], full: Sequence[Record] | None, beside: Mapping[str, Any] | None
) -> Iterator[str]:
    if full is None:
        return
    pairs = paired(records, full)
    if len(pairs) < len(records):
        yield f"compared with Full on {len(pairs)} of {len(records)} examples: on the others Full has no same prompt"
    if beside and beside["diff"] > 0 and beside["p"] < ALPHA:
        yield f"scores above Full (p = {beside['p']:.2g}): look for a bug in either before you believe it"
    same = all(read_in_part(ours) and ours.answer == theirs.answer for ours, theirs in pairs)
    if same and should_differ([ours for ours, _ in pairs]):
        yield f"all {len(pairs)} outputs are Full's though only a part was attended: check that the method really ran"


def same_outputs(runs: Iterable[tuple[str, str, Sequence[Record]]]) -> Iterator[str]:
    """Different methods that put out the same at a partial budget: one of them may not have been applied. Each run is
    its title, its method and its records."""
    alike: dict[str, list[tuple[str, str, Sequence[Record]]]] = defaultdict(list)
    for title, method, records in runs:
        if should_differ(records) and all(read_in_part(record) for record in records):
            outputs = sorted((record.id, *record.answer) for record in records)
            alike[hashlib.sha256(repr(outputs).encode()).hexdigest()].append((title, method, records))
    for same in alike.values():
        if len({method for _, method, _ in same}) > 1:
            names = ", ".join(title for title, _, _ in same)
            yield f"{names}: the same {len(same[0][2])} outputs at partial budgets; were all of them applied?"


def should_differ(records: Sequence[Record]) -> bool:
    """Whether equal outputs are worth an alarm. Right answers are alike whoever gives them; wrong ones and free text
    part sooner or later."""
    return sum(len(record.tokens) for record in records if record.score < 1) >= MIN_WRONG_TOKENS


def read_in_part(record: Record) -> bool:
    """Whether less than all sealed tokens was attended."""
    return record.attended_share is not None and record.attended_share < 1
