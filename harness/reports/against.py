"""Methods against methods: every row held against one that was named, on the same prompts.

Runs that differ in their seed alone are pooled, and the prompt is the unit: seeds of a task's data bring further
prompts, and where the prompts are the same, because seeds only sample, a prompt's scores are averaged first. Holm's
correction is over all that is shown, scores and likelihoods of all rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from evals import stats
from evals.stats import ALPHA, Paired, Shift
from harness.config.plugins import suggestion
from harness.reports.compare import Comparison, ReportRow, asked
from harness.reports.labels import budget, name, titles
from harness.results.compared import given
from harness.results.files import canonical
from harness.results.records import Record, StoreError
from harness.results.run_folder import StoredRun
from harness.results.summary import ONE_TABLE, cost_of

POOLED = tuple(key for key in ONE_TABLE if key != "seed")


@dataclass
class PromptScores:
    """Holds the scores and costs of one prompt under one method, one for each seed of sampling."""

    group: str
    unit: str
    scores: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)


@dataclass
class PooledRow:
    """A method at one budget, over all seeds: its prompts by their hash."""

    label: str
    budget: str
    runs: list[StoredRun] = field(default_factory=list)
    prompts: dict[str, PromptScores] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.label} {self.budget}".strip()

    def names(self) -> set[str]:
        """Return the names that a user may give the row: its label or its preset, each with or without its budget."""
        called = {self.label, name(self.runs[0], "method")}
        return called | {f"{one} {self.budget}".strip() for one in called}

    def add(self, run: StoredRun) -> None:
        self.runs.append(run)
        seed = run.config.get("seed")
        for record in run.records:
            # units of the same name under another seed are other texts, unless the prompt is the same
            new = PromptScores(record.group, f"{record.independent} of seed {seed}")
            _note(self.prompts.setdefault(record.prompt_sha256, new), record)


def _note(prompt: PromptScores, record: Record) -> None:
    prompt.scores.append(record.score)
    if (cost := cost_of(record)) is not None:
        prompt.costs.append(cost)


@dataclass(frozen=True)
class Contrast:
    """Compares one row with another. `score`: None where texts were fed in place of answers; `cost`: None where no
    likelihoods are there."""

    row: PooledRow
    other: PooledRow
    n: int  # prompts that both have
    score: Paired | None
    cost: Shift | None


@dataclass(frozen=True)
class Contrasts:
    """Holds the comparisons of one table's rows with the named one. `left_out`: titles without a counterpart."""

    title: str
    reference: str
    contrasts: list[Contrast]
    left_out: list[str]

    def adjusted(self) -> Iterator[tuple[float | None, float | None]]:
        """Yield per contrast p of score and likelihood after Holm's correction over all of them."""
        ps = [test.p for one in self.contrasts for test in (one.score, one.cost) if test]
        corrected = iter(stats.holm(ps))
        for one in self.contrasts:
            yield next(corrected) if one.score else None, next(corrected) if one.cost else None

    def stars(self) -> list[tuple[bool, bool]]:
        """Say per contrast whether score and likelihood still differ after this correction."""
        return [(_holds(score), _holds(cost)) for score, cost in self.adjusted()]


def _holds(p: float | None) -> bool:
    return p is not None and p < ALPHA


def contrasts(tables: Sequence[Comparison], reference: str) -> list[Contrasts]:
    """Hold all rows against those called `reference`: a method's label or preset, which stands for its row of the same
    budget, or with a budget behind it (`snapkv 20%`) for that row. Raises `StoreError` where nothing is called so."""
    groups: dict[str, list[Comparison]] = defaultdict(list)
    places: Counter[str] = Counter()  # tables of one seed that differ in prompts or right answers are not pooled
    for table in tables:
        run = table.entries[0].run
        pool = canonical({key: run.config.get(key) for key in POOLED} | {"model": given(run)["model_revision"]})
        seed = canonical({"pool": pool, "seed": run.config.get("seed")})
        groups[f"{pool} {places[seed]}"].append(table)
        places[seed] += 1
    named = titles([group[0].entries[0].run for group in groups.values()], POOLED)
    pooled = [
        (title, group[0].of_perplexity, _rows(group)) for title, group in zip(named, groups.values(), strict=True)
    ]
    known = sorted({called for _, _, rows in pooled for row in rows for called in row.names()})
    if reference not in known:
        raise StoreError(f"--against {reference}: no run is called so{suggestion(reference, known)}")
    found = [_contrasts(title, rows, reference, fed) for title, fed, rows in pooled]
    return [one for one in found if one.contrasts or one.left_out]


def _rows(tables: Sequence[Comparison]) -> list[PooledRow]:
    found: dict[tuple[str, str], PooledRow] = {}
    entries: list[ReportRow] = [entry for table in tables for entry in table.entries]
    for entry in sorted(entries, key=lambda entry: (entry.label, asked(entry.summary))):
        key = entry.label, budget(entry.summary)
        found.setdefault(key, PooledRow(*key)).add(entry.run)
    return list(found.values())


def _contrasts(title: str, rows: Sequence[PooledRow], reference: str, fed: bool) -> Contrasts:
    named = [row for row in rows if reference in row.names()]
    others = [row for row in rows if row not in named]
    if len(named) > 1 or not named:  # one for each budget
        by_budget = {row.budget: row for row in named}
        pairs = [(row, by_budget.get(row.budget)) for row in others]
    else:
        pairs = [(row, named[0]) for row in others]
    made = [(row, other and _contrast(row, other, fed)) for row, other in pairs]
    left_out = [row.title for row, contrast in made if contrast is None] if named else []
    return Contrasts(title, reference, [contrast for _, contrast in made if contrast], left_out)


def _contrast(row: PooledRow, other: PooledRow, fed: bool) -> Contrast | None:
    """Compare two rows; return None where they share no prompt."""
    pairs = [(prompt, other.prompts[sha]) for sha, prompt in row.prompts.items() if sha in other.prompts]
    if not pairs:
        return None
    score: Paired | None = None
    if not fed:
        ours, theirs = ([fmean(prompt.scores) for prompt in side] for side in zip(*pairs, strict=True))
        score = stats.paired(ours, theirs, [one.group for one, _ in pairs], [one.unit for one, _ in pairs])
    priced = [(one, two) for one, two in pairs if one.costs and two.costs]
    cost: Shift | None = None
    if priced:
        ours, theirs = ([fmean(prompt.costs) for prompt in side] for side in zip(*priced, strict=True))
        cost = stats.shift(ours, theirs, [one.unit for one, _ in priced])
    return Contrast(row, other, len(pairs), score, cost)


def as_plain(found: Contrasts) -> list[dict[str, Any]]:
    """Return a line of a spreadsheet for each contrast, raw."""
    return [
        {
            "table": found.title,
            "label": one.row.label,
            "budget": one.row.budget,
            "against": one.other.title,
            "n": one.n,
            "runs": len(one.row.runs),
            **_plain("score", one.score, p_score),
            **_plain("likelihood", one.cost, p_cost),
        }
        for one, (p_score, p_cost) in zip(found.contrasts, found.adjusted(), strict=True)
    ]


def _plain(what: str, test: Paired | Shift | None, p_holm: float | None) -> dict[str, Any]:
    ends = (test.ci.low, test.ci.high) if test and test.ci else (None, None)
    return {
        f"{what}.diff": test and test.diff,
        f"{what}.ci95.low": ends[0],
        f"{what}.ci95.high": ends[1],
        f"{what}.p": test and test.p,
        f"{what}.p_holm": p_holm,
    }
