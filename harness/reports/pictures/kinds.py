"""The kinds of figures, by name: `--figure` draws one of them for a paper, a report's page some for each table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import NamedTuple

from harness.config.plugins import suggestion
from harness.reports.choice import Chosen
from harness.reports.compare import PERPLEXITY, Comparison, ReportRow, corrected
from harness.reports.paper.columns import groups_called
from harness.reports.pictures import along, differences, heatmap, lengths, scores
from harness.reports.pictures.figures import Drawn, Look, literal, styled
from harness.results.summary import summary_of

MOST = 100  # rows of a table in a figure; a taller one is slow to draw and shown nowhere
PAGE = Look(width=None)


class Kind(NamedTuple):
    """A kind of figure. `draw` returns why tables have nothing to draw, and what to do about it, where
    they have nothing. `by_model`: one table holds all tasks of a model."""

    draw: Callable[[Sequence[Comparison], Look], Drawn | str]
    on_page: bool = True
    by_model: bool = False


KINDS = {
    "differences": Kind(differences.differences),
    "frontier": Kind(scores.frontier),
    "budget": Kind(scores.by_budget, on_page=False),
    "along": Kind(along.along),
    "needles": Kind(heatmap.needles),
    "length": Kind(lengths.lengths, on_page=False, by_model=True),
}


def of_paper(
    kind: str, chosen: Sequence[Chosen], look: Look, names: Mapping[str, str] | None = None
) -> Drawn:
    """Return a figure of the chosen runs. Panels are headed by what tells them apart of group, task
    and model; `names`: what is printed in place of a group. Raise `ValueError` if the runs have
    nothing to draw."""
    rows: dict[tuple[str, str, str], list[ReportRow]] = defaultdict(list)
    names = names or {}
    typed = names.values()
    for one, group in product(chosen, look.groups or [""]):
        row = replace(one.row, label=literal(one.method, typed), printed=literal(one.budget, typed))
        if part := _part(row, group) if group else row:
            rows[one.model, "" if KINDS[kind].by_model else one.task, group].append(part)
    if missing := [group for group in look.groups if group not in {place[2] for place in rows}]:
        there = {record.group for one in chosen for record in one.row.run.records}
        known = there | {part for group in there for part in group.split("/")}
        raise ValueError(f"groups: {missing[0]} is in no run{suggestion(missing[0], known)}")
    words = [list(dict.fromkeys(some)) for some in zip(*rows, strict=True)]
    side = slice(None, None, 1 if look.panels == "task" else -1)
    tables = []
    for place in sorted(rows, key=lambda place: [*map(list.index, words, place)][side]):
        model, task, group = (
            word if len(some) > 1 else "" for word, some in zip(place, words, strict=True)
        )
        heading = ", ".join(
            literal(word, typed) for word in (names.get(group, group), task, model) if word
        )
        metric = next(one.table.metric for one in chosen if one.task == place[1] or not place[1])
        entries = rows[place]
        if look.groups:
            entries = corrected(entries, has_scores=metric != PERPLEXITY)
        tables.append(Comparison(heading, metric, entries))
    drawn = _drawn(kind, tables, look)
    if isinstance(drawn, str):
        raise ValueError(f"--figure {kind}: {drawn}.")
    return drawn


def _part(row: ReportRow, group: str) -> ReportRow | None:
    """Return the row with only the examples of the groups that have this name; None if it has
    none."""
    groups = groups_called(group, sorted({record.group for record in row.run.records}))
    run, full = (
        one and replace(one, records=[r for r in one.records if r.group in groups])
        for one in (row.run, row.full)
    )
    if not run or not run.records:
        return None
    return replace(row, run=run, full=full, summary=summary_of(run, full))


def of_page(table: Comparison) -> Iterator[tuple[str, Drawn]]:
    """Yield the figures that a report's page has for a table, by kind."""
    rows = [replace(row, label=literal(row.label)) for row in table.entries]
    tables = [replace(table, title="", entries=rows)]
    for kind in (kind for kind, one in KINDS.items() if one.on_page):
        if isinstance(drawn := _drawn(kind, tables, PAGE), Drawn):
            yield kind, drawn


def _drawn(kind: str, tables: Sequence[Comparison], look: Look) -> Drawn | str:
    with styled(look):
        drawn = KINDS[kind].draw(list(map(_fewer, tables)), look)
    if isinstance(drawn, str):
        return drawn
    more = [len(table.entries) for table in tables if len(table.entries) > MOST]
    cut = [f"the {MOST} rows of {count} that score best" for count in more]
    return drawn._replace(caption="; ".join([drawn.caption, *cut]) + ".")


def _fewer(table: Comparison) -> Comparison:
    """Return the table with the rows that score best if it has more than `MOST`, in their order."""

    def merit(entry: ReportRow) -> float:
        if table.of_perplexity:
            return -((entry.summary["likelihood"] or {}).get("mean") or inf)
        return entry.summary["score"]["mean"] or 0

    best = sorted(table.entries, key=merit)[-MOST:]
    return replace(table, entries=[entry for entry in table.entries if entry in best])
