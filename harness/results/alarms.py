"""Every alarm there is: what a run's own records give away, and what a table of runs must not hide.

`warnings` are a run's own and stand in its summary.json. `alarms` need the table: its other rows, and how many of them
the correction is over.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

from evals.stats import ALPHA
from harness.config.settings import TUNING_SEED
from harness.results import bands
from harness.results.pairs import FULL, group_means, mean_score, paired
from harness.results.records import Record
from harness.results.store import StoredRun
from harness.terminal.notices import SLOW_FP16
from harness.terminal.tables import percent

MIN_WRONG_TOKENS = 100  # tokens of answers that are not fully right
NEAR = 0.1  # a Full this close to guessing leaves no room to lose
OFF = 0.1  # of the budget: what a step reads may differ from it by so much


@dataclass(frozen=True, slots=True)
class Alarm:
    """`red`: something is wrong until it is explained. Otherwise the rows mean less than a reader may think."""

    kind: str
    text: str
    rows: tuple[str, ...]  # titles
    red: bool = False


class Row(NamedTuple):
    """A run in its table."""

    title: str
    run: StoredRun
    full: StoredRun | None
    summary: Mapping[str, Any]
    p: float | None = None  # of its difference to Full, as the table stars it: corrected where the table corrects


def alarms(rows: Sequence[Row], known: Sequence[bands.Band] | None = None) -> list[Alarm]:
    """Of one table, red ones first. `known`: the bands of Full, those of bands.json without it."""
    known = bands.stored() if known is None else known
    checks = (partial(_outside_band, known=known), _above_full, _as_full, _same_outputs)
    cautions = (_of_a_search, _budgets_differ, _windows_differ, _off_budget, _simulated)
    return [alarm for check in (*checks, *cautions) for alarm in check(rows)]


def _outside_band(rows: Sequence[Row], known: Sequence[bands.Band]) -> Iterator[Alarm]:
    fulls = [row.run if row.summary["method"] == FULL else row.full for row in rows]
    for run in {run.folder: run for run in fulls if run is not None}.values():
        if found := bands.outside(run, known):
            means = "; ".join(map(_against_band, found))
            text = (
                f"Full is outside its band: {means}. Model, template, data, scorer or library differ from those it "
                "was published with: run `python -m harness.canonical` before you believe a row"
            )
            yield Alarm("outside_band", text, tuple(row.title for row in rows), red=True)


def _against_band(one: bands.Outside) -> str:
    return (
        f"{one.group or 'mean'} {percent(one.mean)} {_ends(one.here)} on {one.examples} examples, "
        f"where {percent(one.expected)} {_ends(one.band)} was published"
    )


def _ends(interval: Any) -> str:
    return f"[{percent(interval.low, 0)}, {percent(interval.high, 0)}]"


def _of_a_search(rows: Sequence[Row]) -> Iterator[Alarm]:
    if found := tuple(row.title for row in rows if row.run.config.get("seed") == TUNING_SEED):
        text = f"seed={TUNING_SEED} is of the examples that harness.tune chooses parameters by: no result to report"
        yield Alarm("tuning_seed", text, found)


def _above_full(rows: Sequence[Row]) -> Iterator[Alarm]:
    above = [row for row in rows if row.p is not None and row.p < ALPHA and row.summary["full"]["diff"] > 0]
    if above:
        named = ", ".join(f"{row.title} (p = {row.p:.2g})" for row in above)
        text = f"significantly above Full: {named}; look for a bug in either before you believe it"
        yield Alarm("above_full", text, _titles(above), red=True)


def _as_full(rows: Sequence[Row]) -> Iterator[Alarm]:
    for row in rows:
        pairs = paired(row.run.records, row.full.records if row.full else [])
        same = all(read_in_part(ours) and ours.answer == theirs.answer for ours, theirs in pairs)
        if pairs and same and should_differ([ours for ours, _ in pairs]):
            text = f"{row.title}: all {len(pairs)} outputs are Full's though only a part was read; did the method run?"
            yield Alarm("same_as_full", text, (row.title,), red=True)


def _same_outputs(rows: Sequence[Row]) -> Iterator[Alarm]:
    """Different methods that put out the same at a partial budget: one of them may not have been applied."""
    alike: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        records = row.run.records
        if should_differ(records) and all(map(read_in_part, records)):
            outputs = sorted((record.id, *record.answer) for record in records)
            alike[hashlib.sha256(repr(outputs).encode()).hexdigest()].append(row)
    for same in alike.values():
        if len({row.summary["method"] for row in same}) > 1:
            count = len(same[0].run.records)
            text = f"{', '.join(_titles(same))}: the same {count} outputs at partial budgets; were all of them applied?"
            yield Alarm("same_outputs", text, _titles(same), red=True)


def _budgets_differ(rows: Sequence[Row]) -> Iterator[Alarm]:
    """Rows whose budgets do not count the same thing."""
    ruled = [row for row in rows if _has_budget(row)]
    for what, meaning in (("budget", _kind), ("budget_rule", _rule), ("align", _align), ("dense_layers", _dense)):
        yield from _unequal(ruled, what, meaning)


def _windows_differ(rows: Sequence[Row]) -> Iterator[Alarm]:
    """Several methods, some of which have left their paper's split of the budget, but not all for the same one."""
    rows = [row for row in rows if _use(row).get("windows")]
    if len({row.summary["method"] for row in rows}) > 1 and any(_use(row)["windows_typed"] for row in rows):
        for name in ("sinks", "recent_ratio"):
            yield from _unequal(rows, name, partial(_window, name=name))


def _window(row: Row, name: str) -> str | None:
    value = _use(row)["windows"].get(name)
    return None if value is None else f"{value:g}"


def _unequal(rows: Sequence[Row], what: str, meaning: Callable[[Row], str | None]) -> Iterator[Alarm]:
    """`meaning`: None for a row to which the setting makes no difference."""
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if (kind := meaning(row)) is not None:
            kinds[kind].append(row)
    if len(kinds) > 1:
        named = "; ".join(f"{what}={kind}: {', '.join(_titles(same))}" for kind, same in kinds.items())
        text = f"the budget does not mean the same in all rows, compare only within one of these: {named}"
        yield Alarm("unaligned", text, _titles(rows))


def _has_budget(row: Row) -> bool:
    budget = row.summary["budget"]
    return budget["asked"] is not None or bool(budget["layers"] or budget.get("bytes"))


def _kind(row: Row) -> str:
    asked, layers = row.summary["budget"]["asked"], row.summary["budget"]["layers"]
    if row.summary["budget"].get("bytes"):
        return "bytes"
    return "by layer" if layers else "a share" if isinstance(asked, float) else "a number of tokens"


def _rule(row: Row) -> str | None:
    """Only where the method's paper leaves something out does the rule change anything."""
    return row.run.config.get("budget_rule", "read") if _use(row).get("paper_leaves_out") else None


def _align(row: Row) -> str:
    return str(row.run.config.get("align", "tokens"))


def _dense(row: Row) -> str:
    return str(list(row.run.config.get("dense_layers") or []))


def _use(row: Row) -> Mapping[str, Any]:
    """How the method takes a budget, as its run noted it; runs of earlier versions did not."""
    return row.run.info.get("budget_use") or {}


def _off_budget(rows: Sequence[Row]) -> Iterator[Alarm]:
    """What a head that selects, or the KV head that serves it, really reads."""
    for what, who in (("attended", "a head"), ("union", "a KV head, over its query heads,")):
        off = [(row, share, asked) for row in rows for share, asked in _read_and_asked(row, what)]
        off = [(row, share, asked) for row, share, asked in off if abs(share - asked) > OFF * asked]
        if off:
            named = ", ".join(f"{row.title} ({percent(share)} % for {percent(asked)} %)" for row, share, asked in off)
            yield Alarm("off_budget", f"{who} reads other than the budget: {named}", _titles([row for row, *_ in off]))


def _read_and_asked(row: Row, what: str) -> Iterator[tuple[float, float]]:
    """Mean shares of the prompt; nothing where the budget counts something else by intention."""
    asked, config = row.summary["budget"]["asked"], row.run.config
    plain = (config.get("budget_rule", "read"), config.get("align", "tokens")) == ("read", "tokens")
    if asked is None or not plain or config.get("dense_layers"):
        return
    records = [record for record in row.run.records if getattr(record, f"{what}_share") is not None]
    if records:
        shares = [asked if isinstance(asked, float) else min(1.0, asked / record.sealed_tokens) for record in records]
        yield fmean(getattr(record, f"{what}_share") for record in records), fmean(shares)


def _simulated(rows: Sequence[Row]) -> Iterator[Alarm]:
    """Cells that look like measurements and are none."""
    kinds = {
        "random weights, so scores mean nothing": [r for r in rows if r.run.info.get("weights") == "random"],
        "the prefill was shared, so there are no times": [r for r in rows if r.summary["simulated"]],
        "placement=host or disk on a CPU: bytes are counted but crossed no bus, so times say nothing of offloading": [
            r for r in rows if r.summary["host_is_cpu"] and stored_away(r.summary["memory"])
        ],
    }
    for meaning, found in kinds.items():
        if found:
            named = "all rows" if len(found) == len(rows) > 1 else ", ".join(_titles(found))
            yield Alarm("simulated", f"simulated: {meaning}: {named}", _titles(found))


def stored_away(memory: Mapping[str, Any]) -> bool:
    """Whether keys and values lay outside the device. `memory`: of a summary."""
    return any(memory.get(f"kv_{tier}_bytes") for tier in ("host", "disk"))


def _titles(rows: Iterable[Row]) -> tuple[str, ...]:
    return tuple(row.title for row in rows)


def should_differ(records: Sequence[Record]) -> bool:
    """Whether equal outputs are worth an alarm. Right answers are alike whoever gives them; wrong ones and free text
    part sooner or later."""
    return sum(len(record.tokens) for record in records if record.score < 1) >= MIN_WRONG_TOKENS


def read_in_part(record: Record) -> bool:
    """Whether less than all sealed tokens was attended."""
    return record.attended_share is not None and record.attended_share < 1


def warnings(
    records: Sequence[Record],
    full: Sequence[Record] | None,
    *,
    config: Mapping[str, Any],
    info: Mapping[str, Any],
) -> Iterator[str]:
    """What a reader must know before believing the row of a run."""
    chance = info.get("task_info", {}).get("chance", 0.0)
    if not records:
        yield "no example was run"
    elif chance is not None:
        yield from _near_chance(records if info.get("method") == FULL else full or [], chance)
    yield from _about_examples(records)
    if (config.get("device"), config.get("dtype")) == ("cpu", "fp16"):
        yield SLOW_FP16
    if full is not None and (count := len(paired(records, full))) < len(records):
        yield f"compared with Full on {count} of {len(records)} examples: on the others Full has no same prompt"


def _about_examples(records: Sequence[Record]) -> Iterator[str]:
    n = len(records)
    for reason, count in Counter(r.fallback for r in records if r.fallback).items():
        yield f"the method fell back on {count} of {n} examples: {reason}"
    counts = {
        "ended before the cache was sealed: the method did nothing there": sum(not r.sealed for r in records),
        "have no TPOT: fewer than 3 tokens": sum(r.tpot_s is None for r in records),
        "ran into the token limit": sum(any(one.stop == "length" for one in r.replies) for r in records),
    }
    yield from (f"{count} of {n} examples {what}" for what, count in counts.items() if count)
    for warning, count in alike([warning for r in records for warning in r.warnings]):
        yield f"{count} of {n} examples: {warning}"


def alike(warnings: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Warnings that differ in their numbers alone as one, with the span of each number."""
    kinds: dict[tuple[str, ...], list[list[int]]] = defaultdict(list)
    for warning in warnings:
        words = tuple(re.split(r"\d+", warning))
        kinds[words].append([int(number) for number in re.findall(r"\d+", warning)])
    for words, numbers in kinds.items():
        spans = [" to ".join(map(str, sorted({min(column), max(column)}))) for column in zip(*numbers, strict=True)]
        yield "".join(chain.from_iterable(zip(words, [*spans, ""], strict=True))), len(numbers)


def at_chance(full: Sequence[Record], chance: float | None) -> bool:
    """Whether Full itself fails: every method then looks as good as Full."""
    return chance is not None and bool(full) and mean_score(full) <= chance + NEAR


def _near_chance(full: Sequence[Record], chance: float) -> Iterator[str]:
    means = group_means(full)
    low = [group for group, mean in means.items() if mean <= chance + NEAR]
    if at_chance(full, chance):
        share = 100 * mean_score(full)
        yield f"Full scores {share:.1f}, near the {100 * chance:.0f} of guessing: methods cannot be told apart here"
    elif low:
        yield f"Full is near guessing in {len(low)} of {len(means)} groups: {', '.join(low)}"
