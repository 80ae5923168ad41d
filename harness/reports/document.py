"""A report as text, Markdown or LaTeX: the same tables, conditions and notes each time."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TextIO

from harness.reports import against_tables, by_task, costs, likelihoods, overview
from harness.reports.against import Contrasts
from harness.reports.by_task import TaskColumns
from harness.reports.columns import notes, score_table
from harness.reports.compare import Comparison
from harness.reports.conditions import conditions
from harness.reports.groups import average_meanings, average_table, by_column, by_run, group_table
from harness.reports.stamps import caution
from harness.reports.turns import ago_scores, reuse_rows, turn_reuse, turn_scores, turn_times
from harness.results.alarms import Alarm
from harness.terminal.notices import visible
from harness.terminal.tables import WIDTH, Column, latex_table, markdown_table, text_table


@dataclass(frozen=True, slots=True)
class TableKind:
    """Describes one kind of table. Its first `head` columns name a row; `of`: what a run is there, if anything;
    `timed`: shows times without the rows' stamps."""

    name: str
    caption: str
    columns: Callable[[Comparison], list[Column]]
    head: int
    of: Literal["rows", "traced rows", "turn rows", "columns"]
    note: Callable[[Comparison], str] = lambda table: ""
    timed: bool = False

    def below(self, table: Comparison) -> str:
        """Return the note below the table: what its heads mean, and what its times do not mean."""
        return "; ".join(filter(None, (self.note(table), caution(table) if self.timed else "")))

    def runs(self, table: Comparison) -> list[int]:
        """Return the run that each row of the table is; empty where rows are not runs."""
        if self.of == "turn rows":
            return [place for place, *_ in reuse_rows(table)]
        sections = {"traced rows": "trace"}  # of a summary
        section = sections.get(self.of)
        found = [i for i, entry in enumerate(table.entries) if section is None or entry.summary.get(section)]
        return found if self.of.endswith("rows") else []


OVERVIEW = TableKind("overview", "Scores, times and bytes", overview.overview, 2, "rows")
SCORES = TableKind("scores", "All measurements", score_table, 2, "rows")
OTHER_TABLES = (
    TableKind(
        "likelihood",
        likelihoods.CAPTION,
        likelihoods.likelihood_table,
        2,
        "rows",
        lambda _: likelihoods.MEANING,
    ),
    TableKind("costs", "Preparation, seal and peak memory", costs.cost_table, 2, "rows", costs.meaning, True),
    TableKind("parts", "Where the time of a decode step goes", costs.trace_table, 2, "traced rows", timed=True),
    TableKind("turns", "Score by turn", turn_scores, 3, "columns"),
    TableKind("turns_ago", "Score by turns between telling and asking", ago_scores, 2, "columns"),
    TableKind("turn_times", "Time to the first token by turn", turn_times, 3, "columns", timed=True),
    TableKind("turn_reuse", "What a turn found of its history", turn_reuse, 3, "turn rows", timed=True),
    TableKind("groups", "Score by group", partial(by_column, group_table), 2, "columns"),
    TableKind("groups", "Score by group", partial(by_run, group_table), 2, "rows"),
    TableKind("averages", "The task's own averages", partial(by_column, average_table), 1, "columns", average_meanings),
    TableKind("averages", "The task's own averages", partial(by_run, average_table), 2, "rows", average_meanings),
)


def overview_text(tables: Sequence[Comparison], more: str, *, colour: bool = False) -> str:
    """Return the first table of each comparison with the few lines below it. `more`: the line that says where the rest
    is, once at the end. `colour`: alarms are red."""
    parts = []
    for table in tables:
        columns = score_table(table) if table.heads else overview.overview(table)
        parts += [visible(table.title), "", text_table(columns, overview.WIDTH), ""]
        for line in map(visible, overview.lines(table)):
            parts.append(f"{RED}  {line}{PLAIN}" if colour and line.startswith(overview.ALARM) else f"  {line}")
        parts.append("")
    return "\n".join([*parts[:-1], f"  {more}"]) if parts else ""


def as_text(tables: Sequence[Comparison], *, markdown: bool = False, colour: bool = False) -> str:
    """Return every table, with conditions, alarms and notes."""
    render = markdown_table if markdown else text_table
    parts = []
    for table in tables:
        parts += [f"### {table.title}\n" if markdown else visible(table.title)]
        parts += markdown_banner(table) if markdown else banner(table, WIDTH, colour)
        parts += [f"{line}<br>" if markdown else _wrapped(line) for line in conditions(table)]
        parts += ["", render(score_table(table)), ""]
        parts += [f"- {note}" if markdown else _wrapped(note) for note in notes(table)]
        for block in OTHER_TABLES:
            shown = list(pieces(block.columns(table), block.head))
            parts += [line for columns in shown for line in ("", render(columns))]
            if shown and (note := block.below(table)):
                parts += ["", f"- {note}" if markdown else _wrapped(note)]
        parts.append("")
    return "\n".join(parts).rstrip()


def as_latex(tables: Sequence[Comparison]) -> str:
    """A float per table, to be \\input into a paper. In small print below the main one: alarms, conditions, notes, and
    what its stamps point to; advice to whoever makes the table is a comment."""
    parts = ["% \\usepackage{booktabs,graphicx}"]
    for table in tables:
        for block in (SCORES, *OTHER_TABLES):
            below = list(_below(table)) if block is SCORES else [_sentences([block.below(table)])]
            caption, label = f"{block.caption}: {table.title}", f"tab:{_slug(f'{block.name} {table.title}')}"
            parts += latex_table(block.columns(table), caption, label, below)
    return "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class FurtherTable:
    """A table over several of those of runs: methods against methods, or tasks as columns."""

    title: str
    columns: list[Column]
    notes: list[str]


def further_tables(held: Sequence[Contrasts], joined: Sequence[TaskColumns]) -> list[FurtherTable]:
    """Return the tables that were asked for in addition to those of runs."""
    return [
        *(FurtherTable(f"Scores by task: {one.title}", one.columns, [by_task.MEANING]) for one in joined),
        *(
            FurtherTable(
                f"{against_tables.caption(one)}: {one.title}",
                against_tables.columns(one),
                list(against_tables.notes(one)),
            )
            for one in held
        ),
    ]


def further_as_text(tables: Sequence[FurtherTable], *, markdown: bool = False) -> str:
    """These tables below the others."""
    parts = list[str]()
    for one in tables:
        parts += [f"### {one.title}\n"] if markdown else [visible(one.title)]
        for columns in [one.columns] if markdown else pieces(one.columns, 2):
            parts += [(markdown_table if markdown else text_table)(columns), ""]
        parts += [f"- {note}" if markdown else _wrapped(note) for note in one.notes]
        parts.append("")
    return "\n".join(parts).rstrip()


def further_as_latex(tables: Sequence[FurtherTable]) -> str:
    """The same as floats."""
    parts = list[str]()
    for one in tables:
        parts += latex_table(one.columns, one.title, f"tab:{_slug(one.title)}", [_sentences(one.notes)])
    return "\n".join(parts) + "\n"


def _below(table: Comparison) -> Iterator[str]:
    """The paragraphs below the main table."""
    said = list(notes(table))
    warned = [note.removeprefix("! ") for note in said if note.startswith("! ")]
    yield from (_sentences([f"{word(alarm).capitalize()}: {alarm.text}"]) for alarm in table.alarms)
    yield _sentences(list(conditions(table)))
    yield _sentences([note for note in said if not note.startswith("! ")])
    yield f"!: {'; '.join(warned)}." if warned else ""


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _sentences(told: Sequence[str]) -> str:
    return " ".join(f"{text[0].upper()}{text[1:].rstrip('.')}." for text in told if text)


def pieces(columns: Sequence[Column], head: int) -> Iterator[list[Column]]:
    """A wide table in pieces that fit; the first `head` columns head each."""
    shown = [column for column in columns if not column.empty]
    block = shown[:head]
    for column in shown[head:]:
        if len(block) > head and sum(kept.width + 2 for kept in [*block, column]) > WIDTH:
            yield block
            block = shown[:head]
        block.append(column)
    if len(block) > head:
        yield block


def _wrapped(note: str) -> str:
    return textwrap.fill(visible(note), WIDTH, initial_indent="  ", subsequent_indent="    ")


RED, YELLOW, PLAIN = "\033[1;31m", "\033[33m", "\033[0m"


def shows_colour(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that may show colours (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def banner(table: Comparison, width: int, colour: bool) -> Iterator[str]:
    """Yield a paragraph for each alarm, for a terminal."""
    for alarm in table.alarms:
        said = visible(f"{word(alarm)}: {alarm.text}")
        text = textwrap.fill(said, width, initial_indent="  ", subsequent_indent="    ")
        yield f"{RED if alarm.red else YELLOW}{text}{PLAIN}" if colour else text


def markdown_banner(table: Comparison) -> Iterator[str]:
    """A quote per alarm; red ones stand out without colour too."""
    for alarm in table.alarms:
        yield f"> {'🟥' if alarm.red else '🟨'} **{word(alarm)}:** {alarm.text}\n"


def word(alarm: Alarm) -> str:
    return "ALARM" if alarm.red else "caution"
