"""Runs side by side: which belong into one table, what each is called there, which Full each is held against."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from evals import stats
from harness.reports.labels import budget, labels, titles
from harness.results import files
from harness.results.records import StoreError
from harness.results.store import StoredRun, load
from harness.results.summary import ALPHA, SCHEMA, detectable, paired, partial, summarise, telling

FULL = "full"
ONE_TABLE = ("task", "model", "protocol", "chat", "generation", "seed")  # never mixed in one table
SAME_NUMBERS = ("dtype", "device")  # a Full that differs here differs by rounding alone


@dataclass(frozen=True, slots=True)
class Entry:
    """A run in its table. `label` tells it from its neighbours, but for the budget."""

    run: StoredRun
    full: StoredRun | None
    summary: dict[str, Any]
    label: str

    @property
    def title(self) -> str:
        return f"{self.label} {budget(self.summary)}".strip()

    @property
    def significant_groups(self) -> set[str]:
        """Groups whose difference to Full holds after Holm's correction over this run's groups; of one alone, none."""
        groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for ours, theirs in paired(self.run.records, self.full.records if self.full else []):
            groups[ours.group].append((ours.score, theirs.score))
        if len(groups) < 2:
            return set()
        adjusted = stats.holm([stats.p_value(*zip(*pairs, strict=True)) for pairs in groups.values()])
        return {group for group, p in zip(groups, adjusted, strict=True) if p < ALPHA}


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs of one task, model and protocol, Full first."""

    title: str
    metric: str
    entries: list[Entry]

    @property
    def tested(self) -> list[int]:
        """Rows that are held against Full."""
        return [i for i, entry in enumerate(self.entries) if entry.summary["full"]]

    @property
    def significant(self) -> set[int]:
        """Rows whose difference to Full holds after Holm's correction over this table."""
        adjusted = stats.holm([self.entries[i].summary["full"]["p"] for i in self.tested])
        return {i for i, p in zip(self.tested, adjusted, strict=True) if p < ALPHA}

    @property
    def detectable(self) -> list[tuple[Entry, float | None]]:
        """Per row that is held against Full, the smallest loss that it could show after Holm's correction."""
        rows, count = [self.entries[i] for i in self.tested], len(self.tested)
        return [(row, detectable(row.run.records, row.full.records, count)) for row in rows if row.full is not None]


def comparisons(runs: Sequence[StoredRun]) -> list[Comparison]:
    """One table per combination of what must not be mixed; summaries are brought up to date on the way."""
    tables: dict[str, list[StoredRun]] = defaultdict(list)
    for run in runs:
        tables[_combination(run)].append(run)
    groups = list(tables.values())
    names = titles([next((run for run in group if run.info.get("presets")), group[0]) for group in groups], ONE_TABLE)
    return [_comparison(group, title) for group, title in zip(groups, names, strict=True)]


def alarms(entries: Sequence[Entry]) -> Iterator[str]:
    """Different methods that put out the same at a partial budget: one of them may not have been applied."""
    alike: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        records = entry.run.records
        if telling(records) and all(partial(record) for record in records):
            outputs = sorted((record.id, *record.said) for record in records)
            alike[hashlib.sha256(repr(outputs).encode()).hexdigest()].append(entry)
    for same in alike.values():
        if len({entry.summary["method"] for entry in same}) > 1:
            names = ", ".join(entry.title for entry in same)
            yield f"{names}: the same {len(same[0].run.records)} outputs at partial budgets; were all of them applied?"


def reference(run: StoredRun, others: Sequence[StoredRun]) -> StoredRun | None:
    """The Full to hold `run` against; where several fit, the one of the same sources and settings, then the largest."""
    if _method(run) == FULL:
        return None
    fit = [other for other in others if _method(other) == FULL and other.records and _comparable(run, other)]
    return max(fit, key=lambda other: _nearness(run, other), default=None)


def current_summary(run: StoredRun, full: StoredRun | None) -> dict[str, Any]:
    """summary.json as it is, or made again from the records where it is missing or older than what it rests on."""
    path = run.folder / "summary.json"
    with suppress(StoreError):
        if path.exists() and not _stale(stored := files.read_json(path), path, run, full):
            return stored
    full = full or reference(run, list(_neighbours(run)))
    records = full.records if full else None
    summary = summarise(run.records, config=run.config, info=run.info | {"status": run.status}, full=records)
    with suppress(OSError):  # results that may only be read are reported as well
        files.write_json(path, summary)
    return summary


def _comparison(runs: Sequence[StoredRun], title: str) -> Comparison:
    entries = []
    for run, label in zip(runs, labels(runs), strict=True):
        full = reference(run, runs)
        entries.append(Entry(run, full, current_summary(run, full), label))
    entries.sort(key=lambda entry: (_method(entry.run) != FULL, entry.label, _asked(entry.summary)))
    if any(run.config.get("budget_rule") == "paper" for run in runs):
        title += ", budget_rule=paper"
    return Comparison(title, str(runs[0].info.get("task_info", {}).get("metric", "score")), entries)


def _stale(summary: Mapping[str, Any], path: Path, run: StoredRun, full: StoredRun | None) -> bool:
    if summary.get("schema") != SCHEMA or summary.get("status") != run.status:
        return True
    if summary.get("num_examples") != len(run.records) or (full is not None and summary.get("full") is None):
        return True
    sources = [one.folder / name for one in (run, full) if one for name in ("examples.jsonl", "run.json")]
    return any(source.exists() and source.stat().st_mtime > path.stat().st_mtime for source in sources)


def _neighbours(run: StoredRun) -> Iterator[StoredRun]:
    """Runs of Full beside the run's own folder."""
    for folder in sorted(run.folder.parent.glob(f"*-{FULL}-*")):
        with suppress(StoreError):
            yield load(folder)


def _combination(run: StoredRun) -> str:
    return files.canonical({name: run.config.get(name) for name in ONE_TABLE})


def _comparable(run: StoredRun, full: StoredRun) -> bool:
    same = all(run.config.get(name) == full.config.get(name) for name in SAME_NUMBERS)
    return same and _combination(run) == _combination(full)


def _nearness(run: StoredRun, full: StoredRun) -> tuple[bool, int, int]:
    sources = (one.info.get("identity", {}).get("sources") for one in (run, full))
    shared = sum(run.config.get(name) == full.config.get(name) for name in run.config)
    return len(set(sources)) == 1, shared, len(full.records)


def _method(run: StoredRun) -> str:
    return str(run.info.get("method"))


def _asked(summary: Mapping[str, Any]) -> float:
    layers = summary["budget"]["layers"]
    return fmean(layers) if layers else float(summary["budget"]["asked"] or 0)
