"""Under what conditions the rows of a table came about: prompts, dtype, device, machine, versions, commit, settings.

Of rows that differ in code alone it says which is the code of today.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from harness.config.catalogue import flatten
from harness.config.settings import recorded_defaults
from harness.reports.compare import Comparison, ReportRow
from harness.reports.labels import NOT_NAMED, name, spelled_out
from harness.results.files import canonical
from harness.results.identity import CORE_VERSION, meaning_now
from harness.results.records import Record
from harness.results.run_folder import StoredRun

SUBJECTS = (("dtype", "device", "machine"), ("torch", "commit"))  # a line each
SHOWN_APART = ("dtype", "device", "threads", "protocol", "layer_budgets")


def conditions(comparison: Comparison, apart: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield one line for each subject. Where the rows of a table differ in one, it says which row has what. Subjects
    that `apart` holds are left out: they are said elsewhere."""
    entries = comparison.entries
    yield "prompts: " + "; ".join(_prompts([record for entry in entries for record in entry.run.records]))
    for subjects in SUBJECTS:
        if told := [_per_row(what, entries) for what in subjects if what not in (apart or {})]:
            yield "; ".join(told)
    if common := _common_settings([entry.run for entry in entries]):
        yield f"settings: {common}"


def shared(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """Subject -> its sentence, of what all rows of all tables share."""
    entries = [entry for comparison in comparisons for entry in comparison.entries]
    subjects = [what for together in SUBJECTS for what in together]
    return {what: _per_row(what, entries) for what in subjects if len({_facts(one.run)[what] for one in entries}) == 1}


def origin(run: StoredRun) -> dict[str, Any]:
    """Return what run.json says of the machine and the code, as flat values that may be null."""
    machine, git = run.provenance("machine"), run.provenance("git")
    return {
        **{key: git.get(key) for key in ("commit", "dirty")},
        "sources": (run.info.get("provenance") or {}).get("sources"),
        "torch": run.provenance("versions").get("torch"),
        **{key: machine.get(key) for key in ("cpu", "device_name", "threads")},
        "load_average": (machine.get("load_average") or [None])[0],
        "load_average_ended": (run.info.get("load_average_ended") or [None])[0],
    }


def _prompts(records: Sequence[Record]) -> Iterator[str]:
    """Their real lengths, by the length that was asked for where the task has one."""
    lengths: dict[Any, dict[str, int]] = defaultdict(dict)
    for record in records:
        lengths[record.data.get("length")][record.prompt_sha256] = record.prompt_tokens
    for asked, tokens in sorted(lengths.items(), key=lambda pair: pair[0] or 0):
        low, high = min(tokens.values()), max(tokens.values())
        span = f"{low} tokens" if low == high else f"{low} to {high} tokens, median {median(tokens.values()):.0f}"
        yield span if asked is None else f"length={asked}: {span}"
    if not lengths:
        yield "none was run"


def _per_row(what: str, entries: Sequence[ReportRow]) -> str:
    rows: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        rows[_facts(entry.run)[what]].append(entry.title)
    if len(rows) == 1:
        return f"{what}: {next(iter(rows))}"
    most = max(rows, key=lambda fact: len(rows[fact]))
    named = [f"{fact} ({', '.join(titles)})" for fact, titles in rows.items() if fact != most]
    return f"{what}: {most}, but {', '.join(named)}"


def machine_of(run: StoredRun) -> str:
    """Return dtype, machine and threads of a run in a few words."""
    facts = _facts(run)
    return f"{facts['dtype']} on {facts['machine']}"


def _facts(run: StoredRun) -> dict[str, str]:
    known = origin(run)
    threads = f"{known['threads']} thread{'s' * (known['threads'] > 1)}" if known["threads"] else ""
    names = dict.fromkeys(filter(None, (known["device_name"], known["cpu"], threads)))
    commit = (known["commit"] or "unknown")[:7] + " (dirty)" * bool(known["dirty"])
    return {
        "dtype": str(run.config.get("dtype")),
        "device": str(run.config.get("device")),
        "machine": ", ".join(names) or "unknown",
        "torch": known["torch"] or "unknown",
        "commit": commit,
    }


def _common_settings(runs: Sequence[StoredRun]) -> str:
    """Settings that are no default on that device and that all rows share: labels say the others."""
    defaults = recorded_defaults(str(runs[0].config.get("device")))
    usual = flatten(defaults)
    found = [flatten({key: value for key, value in run.config.items() if key in defaults}) for run in runs]
    left_out = {*NOT_NAMED, *SHOWN_APART}
    keys = [key for key in found[0] if key in usual and key.partition(".")[0] not in left_out]
    shared = [key for key in keys if all(one.get(key) == found[0][key] != usual[key] for one in found)]
    return ", ".join(spelled_out(found[0], shared))


CORE = "shared code"


def code_versions(entries: Sequence[ReportRow]) -> Iterator[str]:
    """Yield a note for each method and settings that appear with several versions of the code."""
    alike: dict[str, list[ReportRow]] = defaultdict(list)
    for entry in entries:
        alike[canonical({"method": name(entry.run, "method"), "config": entry.run.config})].append(entry)
    for rows in alike.values():
        codes = [_code(row) for row in rows]
        if modules := _differing(codes):
            told = ", ".join(_told(row, code, modules) for row, code in zip(rows, codes, strict=True))
            yield f"{name(rows[0].run, 'method')}: versions of its code ({', '.join(modules)}): {told}"


def _code(entry: ReportRow) -> dict[str, Any]:
    """Module -> hash of what it means, as the run's identity has it."""
    identity = entry.run.info.get("identity") or {}
    return {**(identity.get("code") or {}), CORE: identity.get("core")}


def _differing(codes: Sequence[Mapping[str, Any]]) -> list[str]:
    modules = dict.fromkeys(module for code in codes for module in code)
    return [module for module in modules if len({code.get(module) for code in codes}) > 1]


def _told(entry: ReportRow, code: Mapping[str, Any], modules: Sequence[str]) -> str:
    today = all(code.get(one) == (CORE_VERSION if one == CORE else meaning_now(one)) for one in modules)
    began = str(entry.run.info.get("started") or "an unknown time")[:16].replace("T", " ")
    return f"{entry.title} began {began}{' with the code of today' * today}"
