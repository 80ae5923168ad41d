"""Puts the rows and columns of a table of a paper together, and says in words what its marks mean
and what it lacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import cos, radians, sin
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.catalogue import ConfigError
from harness.reports.choice import Choice, Chosen, checked, choose
from harness.reports.columns import NOT_KEPT
from harness.reports.compare import PERPLEXITY, Comparison
from harness.reports.overview import ALARM
from harness.reports.paper.cells import STAR, Cell, Key, Row, cells, rows_of
from harness.reports.paper.columns import PaperColumn, columns
from harness.reports.paper.layout import DIMENSIONS, SIZES, Dimension, Layout
from harness.terminal.tables import digits

if TYPE_CHECKING:
    import pandas as pd

Line = tuple[str, ...]  # what a row or a column is called, by level
# of the levels of a dimension
NAMES: dict[Dimension, tuple[str, ...]] = {
    "model": ("Model",),
    "method": ("Method",),
    "budget": ("Budget",),
    "column": ("Group", "Task"),
}
# points of type: of a line of LaTeX's article, and of both columns of its page
LINE, BOTH = 345, 469
CAPITAL, LETTER, RAISED = 7, 5, 4  # the width of a sign, typically; of one beside a number
GAP = 12  # between columns
CITED = 20 * LETTER  # a citation
EMPTY = "--"  # a cell of what was not run or not measured
PARTS = ("value", "low", "high", "marks", "best")


@dataclass(frozen=True)
class PaperTable:
    """The table as it is printed. `cells`: by place of row and column; what was not run has none."""

    layout: Layout
    chosen: Sequence[Chosen]
    row_names: Sequence[str]  # of the levels
    rows: Sequence[Line]
    columns: Sequence[Line]
    cells: Mapping[tuple[int, int], Cell]
    breaks: frozenset[int]  # rows above which there is a rule: another model, or what is not Full

    @property
    def caption(self) -> str:
        """Return the sentences that say what the table shows and what its marks mean."""
        return " ".join([self.layout.caption or self.title, *self.legend()])

    @property
    def title(self) -> str:
        """Return the caption of a table for which the choice has none."""
        tasks, models = (
            list(dict.fromkeys(getattr(one, name) for one in self.chosen))
            for name in ("task", "model")
        )
        fed = all(one.table.of_perplexity for one in self.chosen)
        what = f"{PERPLEXITY} over" if fed else "scores from 0 to 100 of"
        sizes = {len(one.row.run.records) for one in self.chosen}
        low, high = min(sizes), max(sizes)
        prompts = f"{low}" if low == high else f"{low} to {high}"
        return f"{_listed(tasks)}, {_listed(models)}: {what} {prompts} prompts each."

    def legend(self) -> Iterator[str]:
        """Yield a sentence on each mark that the table has, unless the layout has none of it."""
        if not self.layout.legend:
            return
        shown = list(self.cells.values())
        if self.layout.interval == "pm" and any(cell.low is not None for cell in shown):
            yield "±: the larger distance to an end of the 95 % interval."
        if self.layout.interval == "small" and any(cell.low is not None for cell in shown):
            yield "In brackets: the 95 % interval."
        if any(not cell.kept for cell in shown):
            yield f"{NOT_KEPT}: the budget was not kept."
        if any(cell.differs for cell in shown):
            yield f"{STAR}: differs from Full (paired, p < 0.05 after Holm's correction over the table)."
        if any(cell.best for cell in shown):
            yield "Bold: the best of a budget, and what cannot be told from it."
        if len(shown) < len(self.rows) * len(self.columns):
            yield f"{EMPTY}: not measured."

    def notes(self) -> Iterator[str]:
        """Yield what a reader of the table cannot see and its author must know."""
        if self.width > self.line and not self.layout.fit:
            yield (
                f"In LaTeX the table is about {self.width:.0f} points wide, and a line of text "
                f"{self.line}: give size: footnotesize, angle: 30, fit: true or fewer columns in a "
                "file of --paper"
            )
        for row, line in enumerate(self.rows):
            missing = [
                " ".join(filter(None, column))
                for place, column in enumerate(self.columns)
                if (row, place) not in self.cells
            ]
            if missing:
                yield f"{' '.join(filter(None, line))}: not run or not measured: {', '.join(missing)}"
        for one in self.chosen:
            called = f"{one.method} {one.budget} on {one.task}, {one.model}".replace("  ", " ")
            summary = one.row.summary
            if not one.is_full and one.row.full is None:
                why = one.row.not_held or "there is no run of Full on its prompts: run method=full"
                yield f"{called}: compared with no Full, because {why}"
            if summary["status"] != "complete":
                yield f"{called}: {summary['status']} after {summary['num_examples']} examples"
            if summary["num_failed"]:
                yield f"{called}: {summary['num_failed']} examples failed"
            if why := summary["budget"].get("not_kept"):
                yield f"{called}: {NOT_KEPT} {why}"
        tables = {id(one.table): one.table for one in self.chosen}
        alarms = [alarm for table in tables.values() for alarm in table.alarms]
        yield from dict.fromkeys(
            f"{ALARM if alarm.red else 'Caution: '}{alarm.text}" for alarm in alarms
        )

    def parts(self, cell: Cell) -> tuple[str, str]:
        """Return number and interval of a cell as text."""
        if not cell.scored:
            return digits(cell.value), ""
        form = f".{self.layout.digits}f"
        interval = ""
        if cell.low is not None and cell.high is not None:
            distance = max(cell.value - cell.low, cell.high - cell.value)
            interval = {
                "pm": f"±{distance:{form}}",
                "small": f"[{cell.low:{form}}, {cell.high:{form}}]",
                "none": "",
            }[self.layout.interval]
        return f"{cell.value:{form}}", interval

    @property
    def headed(self) -> bool:
        """True if a line above the rows of a model names it in LaTeX, where a column takes room."""
        return len(self.row_names) > 1 and self.row_names[0] in NAMES["model"]

    @property
    def line(self) -> int:
        """The points that a line of text has in LaTeX."""
        return BOTH if self.layout.wide else LINE

    @property
    def width(self) -> float:
        """The points that the table takes in LaTeX, about, unless it is drawn to fit a line."""
        slant = radians(self.layout.angle)
        names = [max(map(_points, some)) for some in zip(self.row_names, *self.rows, strict=True)]
        names = names[self.headed :]
        own = [cos(slant) * _points(line[-1]) + sin(slant) * CAPITAL for line in self.columns]
        for (_, place), cell in self.cells.items():
            number, interval = self.parts(cell)
            beside = max(len(interval), len(cell.marks))
            own[place] = max(own[place], LETTER * len(number) + RAISED * beside)
        for level in range(len(self.columns[0]) - 1):
            spans: dict[Line, list[int]] = defaultdict(list)
            for place, line in enumerate(self.columns):
                spans[line[: level + 1]].append(place)
            for head, under in spans.items():
                own[under[-1]] += max(0, _points(head[-1]) - sum(own[at] + GAP for at in under))
        letters = sum(names) + sum(own) + CITED * self.layout.cite
        return SIZES[self.layout.size or "normalsize"] / 10 * letters + GAP * len(names + own)

    def frame(self) -> pd.DataFrame:
        """Return the table with numbers as they are: each column has a value and, where it is a
        score, the ends of its interval, its marks, and whether it is bold."""
        import pandas as pd

        given = {}
        for number, line in enumerate(self.columns):
            own = [self.cells.get((row, number)) for row in range(len(self.rows))]
            scored = any(cell and cell.scored for cell in own)
            bounded = any(cell and cell.low is not None for cell in own)
            for part in PARTS:
                if part == "value" or (scored and (bounded or part not in ("low", "high"))):
                    absent = {"marks": "", "best": False}.get(part)
                    given[*line, part] = [getattr(cell, part) if cell else absent for cell in own]
        index = (
            pd.MultiIndex.from_tuples(self.rows, names=self.row_names)
            if len(self.row_names) > 1
            else pd.Index([name for (name,) in self.rows], name=self.row_names[0])
        )
        frame = pd.DataFrame(given, index=index)
        frame.columns = pd.MultiIndex.from_tuples(list(given))
        return frame


def _points(word: str) -> int:
    return sum(CAPITAL if letter.isupper() else LETTER for letter in word)


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def paper_table(
    tables: Sequence[Comparison], choice: Choice, config_dirs: Sequence[Path] = ()
) -> PaperTable:
    """Return the table that a choice asks for. Raise `StoreError` or `ConfigError` for a name that
    is in no run."""
    layout = checked(Layout, choice.table, "table")
    chosen = choose(tables, choice, config_dirs)
    by_key = rows_of(chosen)
    found, named = cells(by_key, columns(chosen, layout, choice.names), bold=layout.bold)
    parts = layout, chosen, by_key, found, named
    table = _laid_out(*parts, layout.rows or ("method", "budget"))
    if not layout.rows and table.width > table.line:
        return _laid_out(*parts, ("model", "method", "budget"))
    return table


def _laid_out(
    layout: Layout,
    chosen: Sequence[Chosen],
    by_key: Mapping[Key, Row],
    found: Mapping[tuple[Key, int], Cell],
    named: Sequence[PaperColumn],
    asked: Sequence[Dimension],
) -> PaperTable:
    """Return the table of these cells, whose rows are told apart by the dimensions `asked`."""
    heads = any(one.head for one in named)
    texts: dict[Dimension, dict[int, Line]] = {
        "model": {one.places[0]: (one.model,) for one in chosen},
        "method": {one.places[2]: (one.method,) for one in chosen},
        "budget": {one.places[3]: (one.budget,) for one in chosen},
        "column": {at: (one.head, one.name)[not heads :] for at, one in enumerate(named)},
    }
    down, across = _dimensions(asked, len(texts["model"]))
    spots = [
        (key, number)
        for key, row in by_key.items()
        for number, one in enumerate(named)
        if any(piece.task in row for piece in one.pieces)
    ]
    places = {
        (key, number): dict(
            zip(("model", "method", "budget", "column"), (*key, number), strict=True)
        )
        for key, number in spots
    }
    rows, over = (
        sorted({tuple(at[name] for name in names) for at in places.values()})
        for names in (down, across)
    )

    def line(place: tuple[int, ...], names: Sequence[Dimension]) -> Line:
        parts = [texts[name][at] for name, at in zip(names, place, strict=True)]
        return tuple(word for part in parts for word in part)

    def place(at: Mapping[str, int]) -> tuple[int, int]:
        keys = [tuple(at[name] for name in names) for names in (down, across)]
        return rows.index(keys[0]), over.index(keys[1])

    return PaperTable(
        layout=layout,
        chosen=chosen,
        row_names=[word for name in down for word in NAMES[name][name == "column" and not heads :]],
        rows=[line(one, down) for one in rows],
        columns=[line(one, across) for one in over],
        cells={place(places[spot]): cell for spot, cell in found.items()},
        breaks=frozenset(_breaks(rows, down, {one.places[2] for one in chosen if one.is_full})),
    )


def _dimensions(asked: Sequence[Dimension], models: int) -> tuple[list[Dimension], list[Dimension]]:
    """Return the names that tell rows apart, and those that tell columns apart. A table of one
    model needs no level for it."""
    shown = [name for name in DIMENSIONS if models > 1 or name != "model"]
    down = [name for name in asked if name in shown]
    across = [name for name in shown if name not in asked]
    if not down or not across:
        raise ConfigError(
            f"rows: [{', '.join(asked)}] leaves nothing for the columns: name some of "
            f"{', '.join(DIMENSIONS)}, and the others are the columns"
        )
    return down, across


def _breaks(
    rows: Sequence[tuple[int, ...]], down: Sequence[Dimension], fulls: Container[int]
) -> Iterator[int]:
    """Yield the rows before which another model begins, or rows of Full end."""
    named = [dict(zip(down, row, strict=True)) for row in rows]
    for number, (above, below) in enumerate(pairwise(named), 1):
        leaves_full = above.get("method") in fulls and below.get("method") not in fulls
        if leaves_full or above.get("model") != below.get("model"):
            yield number
