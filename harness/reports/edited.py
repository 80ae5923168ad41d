"""Rows that differ in code alone: which of them is the code of today."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.reports.compare import Entry
from harness.reports.labels import name
from harness.results.files import canonical
from harness.results.identity import CORE_VERSION
from harness.results.meaning import meaning_now

CORE = "shared code"


def notes(entries: Sequence[Entry]) -> Iterator[str]:
    """One per method and settings of which there are several versions."""
    alike: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        alike[canonical({"method": name(entry.run, "method"), "config": entry.run.config})].append(entry)
    for rows in alike.values():
        codes = [_code(row) for row in rows]
        if modules := _differing(codes):
            told = ", ".join(_told(row, code, modules) for row, code in zip(rows, codes, strict=True))
            yield f"{name(rows[0].run, 'method')}: versions of its code ({', '.join(modules)}): {told}"


def _code(entry: Entry) -> dict[str, Any]:
    """Module -> hash of what it means, as the run's identity has it."""
    identity = entry.run.info.get("identity") or {}
    return {**(identity.get("code") or {}), CORE: identity.get("core")}


def _differing(codes: Sequence[Mapping[str, Any]]) -> list[str]:
    modules = dict.fromkeys(module for code in codes for module in code)
    return [module for module in modules if len({code.get(module) for code in codes}) > 1]


def _told(entry: Entry, code: Mapping[str, Any], modules: Sequence[str]) -> str:
    today = all(code.get(one) == (CORE_VERSION if one == CORE else meaning_now(one)) for one in modules)
    began = str(entry.run.info.get("started") or "an unknown time")[:16].replace("T", " ")
    return f"{entry.title} began {began}{' with the code of today' * today}"
