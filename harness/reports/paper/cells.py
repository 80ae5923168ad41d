"""Computes the cells of a table of a paper: values with their intervals, and what their marks say.

All tests are paired on the prompts that both runs answered (evals/stats.py). A star holds after
Holm's correction over all cells of the table. The best of a column is looked for among the rows of
one model and budget, Full apart; what a test, corrected over these rows, does not tell from the best
is as bold as the best.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from statistics import fmean

from evals import stats
from evals.stats import ALPHA
from harness.reports.choice import Chosen
from harness.reports.columns import NOT_KEPT
from harness.reports.paper.columns import PaperColumn
from harness.results.compared import mean_score, paired
from harness.results.records import Record
from harness.results.summary import likelihood
from harness.terminal.tables import unit_of

Row = Mapping[str, Chosen]  # the runs of one model, method and budget, by task
Key = tuple[int, int, int]  # of a row: the places of model, method and budget
STAR = "*"


@dataclass(frozen=True, slots=True)
class Cell:
    """A number as it is printed: a score from 0 to 100 with its interval, or a measure in the unit
    that its column's name has."""

    value: float
    low: float | None = None
    high: float | None = None
    kept: bool = True  # the budget
    differs: bool = False  # from Full
    best: bool = False  # or not told from the best
    scored: bool = True

    @property
    def marks(self) -> str:
        return NOT_KEPT * (not self.kept) + STAR * self.differs


def rows_of(chosen: Sequence[Chosen]) -> dict[Key, dict[str, Chosen]]:
    """Return the runs by row, and then by task."""
    rows: dict[Key, dict[str, Chosen]] = defaultdict(dict)
    for one in chosen:
        model, _, method, budget = one.places
        rows[model, method, budget][one.task] = one
    return dict(sorted(rows.items()))


def cells(
    rows: Mapping[Key, Row], columns: Sequence[PaperColumn], *, bold: bool
) -> tuple[dict[tuple[Key, int], Cell], list[PaperColumn]]:
    """Return the cells by row and number of the column, without those for which no run was made,
    and the columns, those of measures with their unit. `bold`: whether the best are looked for."""
    found: dict[tuple[Key, int], Cell] = {}
    named = []
    ps: dict[tuple[Key, int], float] = {}
    for number, column in enumerate(columns):
        if column.measure:
            known, unit = _measured(rows, column)
            named.append(replace(column, name=f"{column.name} ({unit})" if unit else column.name))
        elif column.own:
            known = _averaged(rows, column)
            named.append(column)
        else:
            known = {key: cell for key, row in rows.items() if (cell := _scored(row, column))}
            named.append(column)
        found |= {(key, number): cell for key, cell in known.items()}
        if column.scored:
            for key in known:
                if (p := _against_full(rows[key], column)) is not None:
                    ps[key, number] = p
    for place, p in zip(ps, stats.holm(list(ps.values())), strict=True):
        found[place] = replace(found[place], differs=p < ALPHA)
    for number, column in enumerate(columns):
        for key in _best(rows, column, found, number) if bold and column.scored else ():
            found[key, number] = replace(found[key, number], best=True)
    return found, named


def _measured(rows: Mapping[Key, Row], column: PaperColumn) -> tuple[dict[Key, Cell], str]:
    """Return the cells of a measure, and the unit that all of them share."""
    assert column.measure
    [piece] = column.pieces
    values = {
        key: value
        for key, row in rows.items()
        if piece.task in row
        and (value := column.measure.of(row[piece.task].row.summary)) is not None
    }
    factor, unit = unit_of(list(values.values()), column.measure.units)
    known = {key: Cell(value / factor, scored=False) for key, value in values.items()}
    return known, unit + column.measure.per * bool(unit)


def _averaged(rows: Mapping[Key, Row], column: PaperColumn) -> dict[Key, Cell]:
    """Return the cells of an average that the task defines. They are no scores if one is above 1."""
    [piece] = column.pieces
    summaries = {key: row[piece.task].row.summary for key, row in rows.items() if piece.task in row}
    values = {
        key: value
        for key, summary in summaries.items()
        if (value := summary["score"]["averages"].get(column.own)) is not None
    }
    factor = 1 if any(value > 1 for value in values.values()) else 100
    return {
        key: Cell(factor * value, kept=not summaries[key]["budget"].get("not_kept"))
        for key, value in values.items()
    }


def _scored(row: Row, column: PaperColumn) -> Cell | None:
    """Return the cell of a score; None if the row lacks a task of the column, or one of its groups
    has no example."""
    if any(piece.task not in row for piece in column.pieces):
        return None
    kept = not any(row[piece.task].row.summary["budget"].get("not_kept") for piece in column.pieces)
    samples = [piece.of(row[piece.task].row.run.records) for piece in column.pieces]
    if not all(samples):
        return None
    if row[column.pieces[0].task].table.of_perplexity:
        cost = likelihood(samples[0], None)
        return Cell(exp(cost["mean"]), kept=kept) if cost else None
    scores, groups, units = _flat(column, samples)
    ends = stats.interval(scores, groups, units=units)
    low, high = (100 * end for end in ends) if ends else (None, None)
    return Cell(100 * fmean(map(mean_score, samples)), low, high, kept=kept)


def _flat(
    column: PaperColumn, samples: Sequence[Sequence[Record]]
) -> tuple[list[float], list[tuple[str, ...]], list[str]]:
    """Return scores, groups within pieces, and units of the records of a column's pieces, as
    evals/stats.py takes them. Pieces of one task may share units."""
    each = [
        (str(number), piece.task, record)
        for number, (piece, some) in enumerate(zip(column.pieces, samples, strict=True))
        for record in some
    ]
    return (
        [record.score for _, _, record in each],
        [(number, record.group) for number, _, record in each],
        [f"{task}/{record.independent}" for _, task, record in each],
    )


def _against_full(row: Row, column: PaperColumn) -> float | None:
    """Return the p of the row's difference to Full; None for Full, or without a Full on the same
    prompts."""
    fulls = {}
    for piece in column.pieces:
        full = row[piece.task].row.full
        if row[piece.task].is_full or full is None:
            return None
        fulls[piece.task] = full.records
    return _p(row, fulls, column)


def _p(row: Row, others: Mapping[str, Sequence[Record]], column: PaperColumn) -> float | None:
    """Return the p of the difference between a row and the records of another, by task; None if a
    task has no prompt that both answered."""
    pairs = [
        paired(piece.of(row[piece.task].row.run.records), others[piece.task])
        for piece in column.pieces
    ]
    if not all(pairs):
        return None
    ours = [[own for own, _ in some] for some in pairs]
    theirs = [[other for _, other in some] for some in pairs]
    if row[column.pieces[0].task].table.of_perplexity:
        cost = likelihood(ours[0], theirs[0])
        return ((cost or {}).get("full") or {}).get("p")
    scores, groups, units = _flat(column, ours)
    return stats.p_value(scores, _flat(column, theirs)[0], units, groups)


def _best(
    rows: Mapping[Key, Row],
    column: PaperColumn,
    found: Mapping[tuple[Key, int], Cell],
    number: int,
) -> Iterator[Key]:
    """Yield the rows that are best in a column among those of their model and budget, and those
    that cannot be told from them. Where that is every row, none is called the best."""
    rivals: dict[tuple[int, int], list[Key]] = defaultdict(list)
    for key, row in rows.items():
        model, _, budget = key
        if (key, number) in found and not next(iter(row.values())).is_full:
            rivals[model, budget].append(key)
    for keys in rivals.values():
        if len(keys) < 2:
            continue
        fed = rows[keys[0]][column.pieces[0].task].table.of_perplexity
        best = (min if fed else max)(keys, key=lambda key: found[key, number].value)
        records = {piece.task: rows[best][piece.task].row.run.records for piece in column.pieces}
        ps = {key: _p(rows[key], records, column) for key in keys if key != best}
        known = {key: p for key, p in ps.items() if p is not None}
        adjusted = stats.holm(list(known.values()))
        alike = [key for key, p in zip(known, adjusted, strict=True) if p >= ALPHA]
        if len(alike) < len(keys) - 1:
            yield from (best, *alike)
