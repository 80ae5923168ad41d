"""The alarms of a table: they need its other rows, and how many of them the correction is over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from evals.stats import ALPHA
from harness.config.settings import TUNING_SEED
from harness.results.alarms.alarm import Alarm, AlarmRow
from harness.results.alarms.run import at_chance
from harness.results.alarms.times import full_elsewhere, shared
from harness.results.compared import paired
from harness.results.records import Record
from methods.tiers.tier import DEVICE, TIERS, bytes_key

MIN_WRONG_TOKENS = 100  # tokens of answers that are not fully right


def alarms(rows: Sequence[AlarmRow]) -> list[Alarm]:
    """Return the alarms of one table, in the order of `MEANINGS`."""
    found = [
        ("above_full", [row for row in rows if _is_above(row)], ""),
        ("same_as_full", [row for row in rows if _is_as_full(row)], ""),
        ("at_chance", [row for row in rows if row.full and _is_at_chance(row)], ""),
        (
            "simulated",
            [row for row in rows if row.run.info.get("weights") == "random"],
            "random weights, so scores mean nothing",
        ),
        (
            "simulated",
            [row for row in rows if row.summary["simulated"]],
            "the prefill was shared, so no times",
        ),
        (
            "simulated",
            [row for row in rows if row.summary["host_is_cpu"] and stored_away(row.summary["memory"])],
            "times hold no transfer, because a CPU's host tier is its own memory",
        ),
        *(("budgets_differ", list(apart), reason) for apart, reason in _budgets(rows)),
        ("shared_machine", shared(rows), ""),
        ("full_elsewhere", full_elsewhere(rows), ""),
        ("lost_turns", [row for row in rows if any(one.lost_turns for one in row.run.records)], ""),
        ("tuning_seed", [row for row in rows if row.run.config.get("seed") == TUNING_SEED], ""),
    ]
    return [
        Alarm(kind, len(some), len(rows), tuple(row.title for row in some), reason)
        for kind, some, reason in found
        if some
    ]


def _is_above(row: AlarmRow) -> bool:
    return row.p is not None and row.p < ALPHA and row.summary["full"]["diff"] > 0


def _is_as_full(row: AlarmRow) -> bool:
    pairs = paired(row.run.records, row.full.records if row.full else [])
    same = all(_read_in_part(ours) and ours.answer == theirs.answer for ours, theirs in pairs)
    return bool(pairs) and same and _should_differ([ours for ours, _ in pairs])


def _is_at_chance(row: AlarmRow) -> bool:
    chance = row.run.info.get("task_info", {}).get("chance")
    return at_chance(row.full.records if row.full else [], chance)


def _should_differ(records: Sequence[Record]) -> bool:
    """Return whether equal outputs are worth an alarm. Right answers are alike whoever gives them; wrong ones and free
    text part sooner or later."""
    return sum(len(record.tokens) for record in records if record.score < 1) >= MIN_WRONG_TOKENS


def _read_in_part(record: Record) -> bool:
    return record.attended_share is not None and record.attended_share < 1


def stored_away(memory: Mapping[str, Any]) -> bool:
    """Return whether keys and values lay outside the device. `memory`: of a summary."""
    return any(memory.get(bytes_key(tier)) for tier in TIERS if tier != DEVICE)


def _budgets(rows: Sequence[AlarmRow]) -> Iterator[tuple[Sequence[AlarmRow], str]]:
    """Yield the rows with a budget where it does not mean the same in all of them, with what it means. The sinks and
    windows of methods differ by right, unless somebody has set those of some methods alone."""
    ruled = [row for row in rows if _has_budget(row)]
    meanings: dict[str, Callable[[AlarmRow], str | None]] = {
        "budget": _unit,
        "budget_rule": lambda row: (
            row.run.config.get("budget_rule", "read") if _use(row).get("paper_leaves_out") else None
        ),
        "align": lambda row: str(row.run.config.get("align", "tokens")),
        "dense_layers": lambda row: str(list(row.run.config.get("dense_layers") or [])),
    }
    windowed = [row for row in ruled if _use(row).get("windows")]
    if len({row.summary["method"] for row in windowed}) > 1 and any(_use(row)["windows_typed"] for row in windowed):
        meanings |= {
            name: lambda row, name=name: _number((_use(row).get("windows") or {}).get(name))  # type: ignore[misc]
            for name in ("sinks", "recent_ratio")
        }
    for name, meaning in meanings.items():
        kinds = defaultdict[str, list[AlarmRow]](list)
        for row in ruled:
            if (kind := meaning(row)) is not None:
                kinds[kind].append(row)
        if len(kinds) > 1:
            reason = "; ".join(f"{name}={kind}: {', '.join(row.title for row in some)}" for kind, some in kinds.items())
            yield [row for some in kinds.values() for row in some], reason


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


def _has_budget(row: AlarmRow) -> bool:
    budget = row.summary["budget"]
    return budget["asked"] is not None or bool(budget["layers"] or budget.get("bytes"))


def _unit(row: AlarmRow) -> str:
    asked, layers = row.summary["budget"]["asked"], row.summary["budget"]["layers"]
    if row.summary["budget"].get("bytes"):
        return "bytes"
    return "by layer" if layers else "a share" if isinstance(asked, float) else "a number of tokens"


def _use(row: AlarmRow) -> Mapping[str, Any]:
    """Return how the method takes a budget, as its run noted it; runs of earlier versions did not."""
    return row.run.info.get("budget_use") or {}
