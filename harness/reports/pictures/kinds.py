"""The kinds of figures, by name: `--figure` draws one of them for a paper, a report's page some for each table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from harness.reports.choice import Chosen
from harness.reports.compare import Comparison
from harness.reports.pictures import along, differences, heatmap, lengths, scores
from harness.reports.pictures.figures import Drawn, Look, styled

MOST = 100  # rows of a table in a figure; a taller one is slow to draw and shown nowhere
PAGE = Look(width=None)


class Kind(NamedTuple):
    """A kind of figure. `lacks`: why tables have nothing to draw, and what to do about it; None if
    they have. `by_model`: one table holds all tasks of a model."""

    lacks: Callable[[Sequence[Comparison], Look], str | None]
    draw: Callable[[Sequence[Comparison], Look], Drawn]
    on_page: bool = True
    by_model: bool = False


KINDS = {
    "differences": Kind(differences.no_differences, differences.differences),
    "frontier": Kind(scores.no_frontier, scores.frontier),
    "budget": Kind(scores.no_budgets, scores.by_budget, on_page=False),
    "along": Kind(along.no_along, along.along),
    "needles": Kind(heatmap.no_needles, heatmap.needles),
    "length": Kind(lengths.no_lengths, lengths.lengths, on_page=False, by_model=True),
}


def of_paper(kind: str, chosen: Sequence[Chosen], look: Look) -> Drawn:
    """Return a figure of the chosen runs. Panels are headed by what tells them apart: task, model, or
    both. Raise `ValueError` if the runs have nothing to draw."""
    rows = [replace(one.row, label=one.method, printed=one.budget) for one in chosen]
    places = [(one.model, "" if KINDS[kind].by_model else one.task) for one in chosen]
    models, tasks = (list(dict.fromkeys(words)) for words in zip(*places, strict=True))
    several = len(models) > 1, len(tasks) > 1
    order = sorted(
        dict.fromkeys(places),
        key=lambda place: (models.index(place[0]), tasks.index(place[1]))[
            :: 1 if look.panels == "task" else -1
        ],
    )
    tables = []
    for place in order:
        words = [word for word, named in zip(place, several, strict=True) if named]
        entries = [row for row, its in zip(rows, places, strict=True) if its == place]
        metric = chosen[places.index(place)].table.metric
        tables.append(Comparison(", ".join(reversed(words)), metric, entries))
    if reason := KINDS[kind].lacks(tables, look):
        raise ValueError(f"--figure {kind}: {reason}.")
    return _drawn(kind, tables, look)


def of_page(table: Comparison) -> Iterator[tuple[str, Drawn]]:
    """Yield the figures that a report's page has for a table, by kind."""
    tables = [replace(table, title="")]
    for kind, (lacks, _, on_page, _) in KINDS.items():
        if on_page and not lacks(tables, PAGE):
            yield kind, _drawn(kind, tables, PAGE)


def _drawn(kind: str, tables: Sequence[Comparison], look: Look) -> Drawn:
    with styled(look):
        figure, caption = KINDS[kind].draw(list(map(_fewer, tables)), look)
    more = [len(table.entries) for table in tables if len(table.entries) > MOST]
    cut = [f"the {MOST} rows of {count} that score best" for count in more]
    return Drawn(figure, "; ".join([caption, *cut]) + ".")


def _fewer(table: Comparison) -> Comparison:
    """Return the table with the rows that score best if it has more than `MOST`, in their order."""
    best = sorted(table.entries, key=lambda entry: entry.summary["score"]["mean"] or 0)[-MOST:]
    return replace(table, entries=[entry for entry in table.entries if entry in best])
