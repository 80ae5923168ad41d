"""Writes a report as text, Markdown or rows of a CSV file: the same tables, conditions and notes in
each.

`overview_text` makes the table that a run prints at its end. The tables' rows come from compare.py,
their cells from columns.py and groups.py, the lines below them from overview.py and notes.py.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from harness.config.catalogue import flatten
from harness.config.plugins import TARGET
from harness.reports import columns, groups
from harness.reports.against import MEANING, differences
from harness.reports.compare import Comparison
from harness.reports.conditions import conditions, origin
from harness.reports.notes import notes, stamps
from harness.reports.overview import ALARM, all_lines, lines
from harness.reports.overview import WIDTH as OVERVIEW_WIDTH
from harness.reports.rerun import command
from harness.terminal.notices import visible
from harness.terminal.tables import WIDTH, Column, in_markdown, markdown_table, text_table

NAMES = 2  # columns that name a row
RED, PLAIN = "\033[1;31m", "\033[0m"
LIKELIHOOD = (
    "NLL: cost of the right answer in nats per token after the seal, mean over groups, 0 where the answer is certain; "
    "NLL vs full: paired difference and interval of the signed-rank test, which a few failed prompts hardly move; "
    "mean: the mean difference, which they do; p: that test's, uncorrected"
)
COSTS = (
    "prepare: once per model; seal: to digest one prompt, median; peaks: the most memory in use while prompts were "
    "read, and from the seal on; on the device what torch had allocated, on the host all that the process held, "
    "with the model and the caches of methods that share a prefill"
)
GROUPS = "*: differs from Full after Holm's correction over the groups of the run"


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Hold one table with its caption and the notes below it."""

    caption: str
    columns: list[Column]
    notes: Sequence[str] = ()


def report_tables(table: Comparison) -> list[ReportTable]:
    """Return all tables on these runs, that of all measurements first; tables without data are left
    out."""
    tables = [
        ReportTable("All measurements", columns.measurements(table), list(notes(table))),
        ReportTable("Likelihood of the right answer", columns.likelihoods(table), [LIKELIHOOD]),
        ReportTable("Preparation, seal and peak memory", columns.costs(table), [COSTS]),
        ReportTable("Where the time of a decode step goes", columns.step_parts(table)),
        ReportTable("Score by turn", groups.by_turn(table, "turns", "score")),
        ReportTable(
            "Score by turns between telling and asking", groups.by_turn(table, "turns_ago", "score")
        ),
        ReportTable("Time to the first token by turn", groups.by_turn(table, "turns", "ttft_s")),
        ReportTable("What a turn found of its history", groups.turn_reuse(table)),
        ReportTable(
            "Score by group", groups.group_table(table), [] if table.of_perplexity else [GROUPS]
        ),
        ReportTable(
            "The task's own averages", groups.average_table(table), [groups.average_meanings(table)]
        ),
    ]
    return [shown for shown in tables if shown.columns]


def overview_text(tables: Sequence[Comparison], more: str, *, colour: bool = False) -> str:
    """Return the first table of each comparison, with the few lines below it, as text for a
    terminal. `more`: the last line, which says where the rest is. `colour`: print alarms in red."""
    parts = []
    for table in tables:
        parts += [visible(table.title), "", text_table(columns.overview(table), OVERVIEW_WIDTH), ""]
        for line in map(visible, lines(table)):
            parts.append(
                f"{RED}  {line}{PLAIN}" if colour and line.startswith(ALARM) else f"  {line}"
            )
        parts.append("")
    return "\n".join([*parts[:-1], f"  {more}"]) if parts else ""


def as_text(tables: Sequence[Comparison], compared: Sequence[Comparison] = ()) -> str:
    """Return all tables as text for a terminal. `compared`: tables of `--against`."""
    parts = []
    for table in tables:
        parts.append(
            "\n".join(
                [visible(table.title), *map(_wrapped, [*all_lines(table), *conditions(table)])]
            )
        )
        parts += map(_block, report_tables(table))
    return "\n\n".join([*parts, *(_block(_against(table)) for table in compared)])


def _against(table: Comparison) -> ReportTable:
    return ReportTable(table.title, differences(table), [MEANING])


def _block(table: ReportTable) -> str:
    """Return a table as text, with its notes. A table that is too wide for a terminal is split into
    several below each other, each of which begins with the columns that name the rows."""
    shown = [column for column in table.columns if not column.empty]
    pieces = [shown[:NAMES]]
    for column in shown[NAMES:]:
        if (
            len(pieces[-1]) > NAMES
            and sum(kept.width + 2 for kept in [*pieces[-1], column]) > WIDTH
        ):
            pieces.append(shown[:NAMES])
        pieces[-1].append(column)
    notes = "\n".join(map(_wrapped, filter(None, table.notes)))
    return "\n\n".join(
        [visible(table.caption), *map(text_table, pieces), *([notes] if notes else [])]
    )


def _wrapped(note: str) -> str:
    return textwrap.fill(visible(note), WIDTH, initial_indent="  ", subsequent_indent="    ")


def as_markdown(tables: Sequence[Comparison], compared: Sequence[Comparison] = ()) -> str:
    """Return all tables as Markdown; a red square marks alarms."""
    parts = []
    for table in tables:
        parts += [f"### {in_markdown(table.title)}\n"]
        said = [*all_lines(table), *conditions(table)]
        parts += [f"- {'🟥 ' * line.startswith(ALARM)}{in_markdown(line)}" for line in said]
        parts += [_markdown(shown) for shown in report_tables(table)]
    return "\n".join([*parts, *(_markdown(_against(table)) for table in compared)]) + "\n"


def _markdown(table: ReportTable) -> str:
    below = "\n".join(f"- {in_markdown(note)}" for note in table.notes if note)
    return f"\n#### {in_markdown(table.caption)}\n\n{markdown_table(table.columns)}\n\n{below}"


def shows_colour(stream: TextIO) -> bool:
    """Return True if the stream is a terminal and the user has not turned colours off
    (NO_COLOR)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def as_rows(tables: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return the rows of a CSV file with raw numbers (shares from 0 to 1, seconds, bytes). Each
    holds the run's summary, p after the table's correction, the method's parameters as
    `parameters.NAME`, the machine and the code, and the command to run it again."""
    rows = []
    for table in tables:
        for entry in table.entries:
            info, config = entry.run.info, entry.run.config
            known = {key: value for key, value in entry.summary.items() if value is not None}
            parameters = {name: value for name, value in config["method"].items() if name != TARGET}
            rows.append(
                dict(cells(known | {"parameters": parameters}))
                | {
                    "label": entry.label,
                    "stamps": stamps(entry, table),
                    "full.p_holm": entry.score_p,
                    "likelihood.full.p_holm": entry.cost_p,
                    "folder": entry.run.folder.name,
                    "started": info.get("started"),
                    "ended": info.get("ended"),
                    **origin(entry.run),
                    "command": command(entry.run),
                }
            )
    return rows


def cells(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for nested values. An interval becomes two keys, `.low` and
    `.high`; other lists become JSON."""
    for key, value in flatten(summary).items():
        if key.rpartition(".")[2] == "ci95":
            yield from zip((f"{key}.low", f"{key}.high"), value or (None, None), strict=True)
        else:
            yield key, json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
