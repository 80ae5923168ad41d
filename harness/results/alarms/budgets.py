"""Cautions about budgets: rows that do not count the same thing, or read other than they were asked to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from harness.results.alarms.alarm import Alarm, Row, titles
from harness.terminal.tables import percent

OFF = 0.1  # of the budget: what a step reads may differ from it by so much


def budgets_differ(rows: Sequence[Row]) -> Iterator[Alarm]:
    """Rows whose budgets do not count the same thing."""
    ruled = [row for row in rows if _has_budget(row)]
    for what, meaning in (("budget", _kind), ("budget_rule", _rule), ("align", _align), ("dense_layers", _dense)):
        yield from _unequal(ruled, what, meaning)


def windows_differ(rows: Sequence[Row]) -> Iterator[Alarm]:
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
        named = "; ".join(f"{what}={kind}: {', '.join(titles(same))}" for kind, same in kinds.items())
        text = f"the budget does not mean the same in all rows; compare only rows of one group: {named}"
        yield Alarm("unaligned", text, titles(rows))


def _has_budget(row: Row) -> bool:
    budget = row.summary["budget"]
    return budget["asked"] is not None or bool(budget["layers"] or budget.get("bytes"))


def _kind(row: Row) -> str:
    asked, layers = row.summary["budget"]["asked"], row.summary["budget"]["layers"]
    if row.summary["budget"].get("bytes"):
        return "bytes"
    return "by layer" if layers else "a share" if isinstance(asked, float) else "a number of tokens"


def _rule(row: Row) -> str | None:
    """Only where the method's paper counts otherwise does the rule change anything. (It once could only leave out.)"""
    return row.run.config.get("budget_rule", "read") if _use(row).get("paper_leaves_out") else None


def _align(row: Row) -> str:
    return str(row.run.config.get("align", "tokens"))


def _dense(row: Row) -> str:
    return str(list(row.run.config.get("dense_layers") or []))


def _use(row: Row) -> Mapping[str, Any]:
    """How the method takes a budget, as its run noted it; runs of earlier versions did not."""
    return row.run.info.get("budget_use") or {}


def off_budget(rows: Sequence[Row]) -> Iterator[Alarm]:
    """What a head that selects, or the KV head that serves it, really reads."""
    for what, who in (("attended", "a head"), ("union", "a KV head, for all its query heads,")):
        off = [(row, share, asked) for row in rows for share, asked in _read_and_asked(row, what)]
        off = [(row, share, asked) for row, share, asked in off if abs(share - asked) > OFF * asked]
        if off:
            read = [f"{row.title} ({percent(share)} % instead of {percent(asked)} %)" for row, share, asked in off]
            text = f"{who} does not read what the budget says: {', '.join(read)}"
            yield Alarm("off_budget", text, titles([row for row, *_ in off]))


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
