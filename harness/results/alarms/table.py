"""The alarms of a table: they need its other rows, and how many of them the correction is over."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any

from evals.stats import ALPHA
from harness.config.settings import TUNING_SEED
from harness.results.alarms.alarm import Alarm, AlarmRow, named, titles
from harness.results.alarms.times import full_elsewhere, launched, shared
from harness.results.compared import changed, paired, same_run
from harness.results.records import Record
from harness.terminal.tables import percent
from methods.tiers.tier import DEVICE, TIERS, bytes_key

MIN_WRONG_TOKENS = 100  # tokens of answers that are not fully right


def alarms(rows: Sequence[AlarmRow]) -> list[Alarm]:
    """Return the alarms of one table, red ones first."""
    checks = (_above_full, _as_full, _same_outputs, _made_twice)
    about_times = (shared, full_elsewhere, launched)
    cautions = (_of_a_search, budgets_differ, windows_differ, off_budget, _lost_turns, _simulated, *about_times)
    return [alarm for check in (*checks, *cautions) for alarm in check(rows)]


def _of_a_search(rows: Sequence[AlarmRow]) -> Iterator[Alarm]:
    if found := tuple(row.title for row in rows if row.run.config.get("seed") == TUNING_SEED):
        text = f"seed={TUNING_SEED} gives the examples on which harness.tune chooses parameters: do not report them"
        yield Alarm("tuning_seed", text, found)


def _above_full(rows: Sequence[AlarmRow]) -> Iterator[Alarm]:
    above = [row for row in rows if row.p is not None and row.p < ALPHA and row.summary["full"]["diff"] > 0]
    if above:
        told = ", ".join(f"{row.title} (p = {row.p:.2g})" for row in above)
        text = f"significantly above Full: {told}; look for a bug in either before you believe it"
        yield Alarm("above_full", text, titles(above), red=True)


def _as_full(rows: Sequence[AlarmRow]) -> Iterator[Alarm]:
    for row in rows:
        pairs = paired(row.run.records, row.full.records if row.full else [])
        same = all(read_in_part(ours) and ours.answer == theirs.answer for ours, theirs in pairs)
        if pairs and same and should_differ([ours for ours, _ in pairs]):
            text = f"{row.title}: all {len(pairs)} outputs are Full's though only a part was read; did the method run?"
            yield Alarm("same_as_full", text, (row.title,), red=True)


def _same_outputs(rows: Sequence[AlarmRow]) -> Iterator[Alarm]:
    """Different methods that put out the same at a partial budget: one of them may not have been applied."""
    alike: dict[str, list[AlarmRow]] = defaultdict(list)
    for row in rows:
        records = row.run.records
        if should_differ(records) and all(map(read_in_part, records)):
            outputs = sorted((record.id, *record.answer) for record in records)
            alike[hashlib.sha256(repr(outputs).encode()).hexdigest()].append(row)
    for same in alike.values():
        if len({row.summary["method"] for row in same}) > 1:
            count = len(same[0].run.records)
            text = f"{', '.join(titles(same))}: the same {count} outputs at partial budgets; were all of them applied?"
            yield Alarm("same_outputs", text, titles(same), red=True)


def _made_twice(rows: Sequence[AlarmRow]) -> Iterator[Alarm]:
    """One run by identity and conditions, with other answers the second time; with the same it is one row."""
    for a, b in combinations(rows, 2):
        if same_run(a.run, b.run) and (count := changed(a.run, b.run)):
            text = (
                f"{a.title} and {b.title} are the same run, and {count} of {len(paired(a.run.records, b.run.records))} "
                "answers or scores differ: shared code changed without its CORE_VERSION, or something is not repeatable"
            )
            yield Alarm("made_twice", text, (a.title, b.title), red=True)


def _lost_turns(rows: Sequence[AlarmRow]) -> Iterator[Alarm]:
    """Of stores that did not keep what they were given."""
    found = [row for row in rows if any(record.lost_turns for record in row.run.records)]
    if found:
        text = (
            "stored histories were lost and computed again, which changes what these methods hold: answers may differ "
            f"from those of a store that keeps all: {'; '.join(map(_losses, found))}"
        )
        yield Alarm("lost_turns", text, titles(found))


def _losses(row: AlarmRow) -> str:
    turns = [turn for record in row.run.records for turn in record.replies if turn.lost_turns is not None]
    causes = ", ".join(dict.fromkeys(turn.lost_to for turn in turns if turn.lost_to))
    return f"{row.title} in {sum(turn.lost_turns or 0 for turn in turns)} of {len(turns)} turns ({causes})"


def _simulated(rows: Sequence[AlarmRow]) -> Iterator[Alarm]:
    """Cells that look like measurements and are none."""
    away = " or ".join(tier for tier in TIERS if tier != DEVICE)
    kinds = {
        "random weights, so scores mean nothing": [r for r in rows if r.run.info.get("weights") == "random"],
        "the prefill was shared, so there are no times": [r for r in rows if r.summary["simulated"]],
        f"placement={away} on a CPU: bytes are counted but crossed no bus, so times say nothing of offloading": [
            row for row in rows if row.summary["host_is_cpu"] and stored_away(row.summary["memory"])
        ],
    }
    for meaning, found in kinds.items():
        if found:
            yield Alarm("simulated", f"simulated: {meaning}: {named(found, rows)}", titles(found))


def stored_away(memory: Mapping[str, Any]) -> bool:
    """Whether keys and values lay outside the device. `memory`: of a summary."""
    return any(memory.get(bytes_key(tier)) for tier in TIERS if tier != DEVICE)


def should_differ(records: Sequence[Record]) -> bool:
    """Whether equal outputs are worth an alarm. Right answers are alike whoever gives them; wrong ones and free text
    part sooner or later."""
    return sum(len(record.tokens) for record in records if record.score < 1) >= MIN_WRONG_TOKENS


def read_in_part(record: Record) -> bool:
    """Whether less than all sealed tokens was attended."""
    return record.attended_share is not None and record.attended_share < 1


OFF = 0.1  # of the budget: what a step reads may differ from it by so much


def budgets_differ(rows: Sequence[AlarmRow]) -> Iterator[Alarm]:
    """Rows whose budgets do not count the same thing."""
    ruled = [row for row in rows if _has_budget(row)]
    for what, meaning in (("budget", _kind), ("budget_rule", _rule), ("align", _align), ("dense_layers", _dense)):
        yield from _unequal(ruled, what, meaning)


def windows_differ(rows: Sequence[AlarmRow]) -> Iterator[Alarm]:
    """Several methods, some of which have left their paper's split of the budget, but not all for the same one."""
    rows = [row for row in rows if _use(row).get("windows")]
    if len({row.summary["method"] for row in rows}) > 1 and any(_use(row)["windows_typed"] for row in rows):
        for name in ("sinks", "recent_ratio"):
            yield from _unequal(rows, name, partial(_window, name=name))


def _window(row: AlarmRow, name: str) -> str | None:
    value = _use(row)["windows"].get(name)
    return None if value is None else f"{value:g}"


def _unequal(rows: Sequence[AlarmRow], what: str, meaning: Callable[[AlarmRow], str | None]) -> Iterator[Alarm]:
    """`meaning`: None for a row to which the setting makes no difference."""
    kinds: dict[str, list[AlarmRow]] = defaultdict(list)
    for row in rows:
        if (kind := meaning(row)) is not None:
            kinds[kind].append(row)
    if len(kinds) > 1:
        named = "; ".join(f"{what}={kind}: {', '.join(titles(same))}" for kind, same in kinds.items())
        text = f"the budget does not mean the same in all rows; compare only rows of one group: {named}"
        yield Alarm("unaligned", text, titles(rows))


def _has_budget(row: AlarmRow) -> bool:
    budget = row.summary["budget"]
    return budget["asked"] is not None or bool(budget["layers"] or budget.get("bytes"))


def _kind(row: AlarmRow) -> str:
    asked, layers = row.summary["budget"]["asked"], row.summary["budget"]["layers"]
    if row.summary["budget"].get("bytes"):
        return "bytes"
    return "by layer" if layers else "a share" if isinstance(asked, float) else "a number of tokens"


def _rule(row: AlarmRow) -> str | None:
    """Only where the method's paper counts otherwise does the rule change anything. (It once could only leave out.)"""
    return row.run.config.get("budget_rule", "read") if _use(row).get("paper_leaves_out") else None


def _align(row: AlarmRow) -> str:
    return str(row.run.config.get("align", "tokens"))


def _dense(row: AlarmRow) -> str:
    return str(list(row.run.config.get("dense_layers") or []))


def _use(row: AlarmRow) -> Mapping[str, Any]:
    """How the method takes a budget, as its run noted it; runs of earlier versions did not."""
    return row.run.info.get("budget_use") or {}


def off_budget(rows: Sequence[AlarmRow]) -> Iterator[Alarm]:
    """What a head that selects, or the KV head that serves it, really reads."""
    for what, who in (("attended", "a head"), ("union", "a KV head, for all its query heads,")):
        off = [(row, share, asked) for row in rows for share, asked in _read_and_asked(row, what)]
        off = [(row, share, asked) for row, share, asked in off if abs(share - asked) > OFF * asked]
        if off:
            read = [f"{row.title} ({percent(share)} % instead of {percent(asked)} %)" for row, share, asked in off]
            text = f"{who} does not read what the budget says: {', '.join(read)}"
            yield Alarm("off_budget", text, titles([row for row, *_ in off]))


def _read_and_asked(row: AlarmRow, what: str) -> Iterator[tuple[float, float]]:
    """Mean shares of the prompt; nothing where the budget counts something else by intention."""
    asked, config = row.summary["budget"]["asked"], row.run.config
    plain = (config.get("budget_rule", "read"), config.get("align", "tokens")) == ("read", "tokens")
    if asked is None or not plain or config.get("dense_layers"):
        return
    records = [record for record in row.run.records if getattr(record, f"{what}_share") is not None]
    if records:
        shares = [asked if isinstance(asked, float) else min(1.0, asked / record.sealed_tokens) for record in records]
        yield fmean(getattr(record, f"{what}_share") for record in records), fmean(shares)
