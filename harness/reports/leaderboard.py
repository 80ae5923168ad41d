"""Writes all published rows as one HTML page to filter, sort and link to, with a table for each set of
prompts, since rows compare only where their prompts are the same.

The rows are those of CSV files that `harness.report --csv` wrote, so a new file or method needs no change
here, and columns are those of a report's first table. A table NAME takes bytes read and times from
NAME_read and NAME_times, which repeat its rows on other prompts.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from harness.config.catalogue import Entry, entries, experiments
from harness.reports.columns import NOT_KEPT, cost_difference, overview
from harness.reports.compare import PERPLEXITY, Comparison, ReportRow
from harness.reports.document import ReportTable
from harness.reports.labels import budget
from harness.reports.notes import stamp_meanings
from harness.reports.page import document, linked, listed, table_html
from harness.results import files
from harness.results.measures import MEASURES
from harness.results.records import StoreError
from harness.results.run_folder import StoredRun
from harness.terminal.tables import BYTES, Column, quantity
from methods.tiers.tier import TIERS, bytes_key

Kind = TypeVar("Kind")  # of a cell's value
# columns of a report's rows, not of other CSV files
KNOWN_BY = {"label", "command", "presets.method", "score.mean"}
REMEDY = "correct it, or make the file again with harness.report --csv"
# what NAME_read and NAME_times add to the rows of NAME
APART = {"read": "bytes read", "times": "TT2T and TPOT"}
FULL, PRESS, REFERENCE = "full", "kvpress", "reference"
KINDS = {
    "evicts": r"\bevicts?\b",
    "reads a part": r"\b(selects?|samples?|draws?)\b",
    "quantises": r"\bbits\b",
}
OF_PROMPTS = (  # columns that are equal for rows with the same prompts
    "model", "protocol", "seed", "num_examples", "prompt_tokens.min", "prompt_tokens.median", "prompt_tokens.max",
)  # fmt: skip
TITLE = "KV-cache methods: all published tables"
INTRODUCTION = (
    "Rows compare within a table alone, where all have the same prompts; numbers of different tables do not compare.",
    "*: differs from Full after Holm's correction over the table. NLL: cost of the right answer; less is better.",
    f"{NOT_KEPT}: the row did not keep its budget, and its notes say what it read.",
    "KV dev, KV host: most bytes of keys, values and index held there; moved, read: bytes of a decode step, the mean; "
    "TT2T: time to the second token, TPOT: time of each further one, medians.",
    "In a command, DATA stands for the folder of your data sets.",
    "Decode steps and operations have times, not scores: docs/benchmarks.md has them, from results/published/bench.",
)


class Row(dict[str, str]):
    """A row of a CSV file, as text by column; what is unknown is empty or missing. `place`: file and
    row, for errors."""

    def __init__(self, place: str, cells: Mapping[str, str]) -> None:
        super().__init__(cells)
        self.place = place

    def __missing__(self, column: str) -> str:
        raise StoreError(f"{self.place}: there is no column {column}; {REMEDY}")

    def parsed(self, column: str, parse: Callable[[str], Kind], kind: str) -> Kind | None:
        """Return the value of a cell; None if it is unknown. Raise `StoreError` if `parse` cannot
        read it, because it holds no `kind`."""
        text = self.get(column, "")
        try:
            return parse(text) if text else None
        except (ValueError, TypeError, RecursionError) as error:
            raise StoreError(
                f"{self.place}, column {column}: {text[:40]!r} is no {kind}; {REMEDY}"
            ) from error


class PublishedRow(NamedTuple):
    """A row of a table (`own`), and by their word in `APART` the rows that repeat it on other prompts."""

    own: Row
    apart: Mapping[str, Row]


class PublishedTable(NamedTuple):
    """The rows of a CSV file, or of an experiment in it, that have the same prompts."""

    name: str
    rows: list[PublishedRow]

    @property
    def title(self) -> str:
        first = self.rows[0].own
        count, tokens = first["num_examples"], _number(first, "prompt_tokens.median") or 0
        prompts = f"{count} prompt{'s' * (count != '1')} of {tokens:.0f} tokens"
        return f"{self.name}: {_task(first)}, {first['model']}, {prompts}"


def leaderboard(folders: Sequence[Path]) -> str:
    """Return the HTML of the page; all text from CSV files is escaped. `folders`: where these lie, at any depth."""
    tables = published_tables(folders)
    if not tables:
        raise StoreError(
            f"{', '.join(map(str, folders))}: no CSV file of harness.report --csv there."
        )
    contents = linked(table.title for table in tables)
    contents = f"<details><summary>All {len(tables)} tables</summary>{contents}</details>"
    before = [listed(INTRODUCTION, "soft"), _filters(tables), contents]
    return document(TITLE, before, map(_section, tables), "--leaderboard")


def published_tables(folders: Sequence[Path]) -> list[PublishedTable]:
    """Return the tables of all CSV files in these folders, that with most methods first."""
    by_name: dict[str, list[Row]] = defaultdict(list)
    for path in sorted({path for folder in folders for path in folder.rglob("*.csv")}):
        for place, known in files.read_csv(path, KNOWN_BY):
            by_name[known.get("experiment") or path.stem].append(Row(place, known))
    tables = []
    for name in by_name.keys() - {f"{name}_{word}" for name in by_name for word in APART}:
        repeated = {
            (word, _key(row)): row for word in APART for row in by_name.get(f"{name}_{word}", ())
        }
        alike: dict[tuple[str, ...], list[PublishedRow]] = defaultdict(list)
        for own in by_name[name]:
            apart = {word: repeated.get((word, _key(own))) for word in APART}
            found = {word: row for word, row in apart.items() if row is not None}
            alike[_prompts(own)].append(PublishedRow(own, found))
        tables += [PublishedTable(name, rows) for rows in alike.values()]

    def order(table: PublishedTable) -> tuple[int, str, str]:
        return -len({_method(row.own) for row in table.rows}), table.name, table.title

    return sorted(tables, key=order)


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row.get(key, "") for key in ("label", "budget.asked", "budget.bytes"))


def _prompts(row: Row) -> tuple[str, ...]:
    """Return what is equal for rows with the same prompts."""
    words = [word for word in _words(row) if word.startswith(("task=", "task."))]
    return (*words, *(row.get(key, "") for key in OF_PROMPTS))


def _words(row: Row) -> list[str]:
    return row.parsed("command", shlex.split, "command line") or []


def _number(row: Row, key: str) -> float | None:
    return row.parsed(key, _finite, "number")


def _finite(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError(text)
    return value


def _texts(text: str) -> list[str]:
    return ["".join(line) for line in json.loads(text)]


def _estimate(row: Row, section: str, key: str) -> dict[str, Any]:
    """Return a number of a section of a run's summary, with its interval and its p."""
    known = {
        name: _number(row, f"{section}.{name}") for name in (key, "p", "ci95.low", "ci95.high")
    }
    ends = [known["ci95.low"], known["ci95.high"]]
    return known | {"ci95": None if None in ends else ends}


def _entry(row: PublishedRow) -> ReportRow:
    """Return the row as a report has it, with those parts of its summary that the first table shows."""
    own = row.own
    times = row.apart.get("times", own)
    size = _number(own, "budget.asked")
    summary = {
        "score": _estimate(own, "score", "mean"),
        "full": _estimate(own, "full", "diff"),
        "likelihood": _estimate(own, "likelihood", "mean")
        | {"full": _estimate(own, "likelihood.full", "diff")},
        "memory": {
            key: _number(own, f"memory.{key}") for key in (*MEASURES, *map(bytes_key, TIERS))
        },
        **{key: {"p50": _number(times, f"{key}.p50")} for key in ("tt2t_s", "tpot_s")},
        "budget": {
            "asked": int(size) if size and size > 1 else size,  # tokens, or a share
            "bytes": _number(own, "budget.bytes"),
            "counts": own.get("budget.counts"),
            "not_kept": own.get("budget.not_kept"),
            "attended": {"share": _number(own, "budget.attended.share")},
        },
    }
    no_run = StoredRun(Path(), {}, {}, [], "complete")
    score_p = _number(own, "full.p_holm")
    cost_p = _number(own, "likelihood.full.p_holm")
    return ReportRow(no_run, None, summary, own["label"], None, score_p, cost_p)


@cache
def _catalogue() -> Mapping[str, Entry]:
    return entries("method")


def _facts(table: PublishedTable, row: PublishedRow) -> dict[str, list[str]]:
    """Return the values of a row by which the page can be filtered."""
    own = row.own
    return {
        "table": [table.name],
        "task": [_task(own)],
        "model": [own["model"]],
        "method": [_method(own)],
        "budget": [budget(_entry(row).summary) or "none"],
        "setting": [_setting(own)],
        "kind": _kinds(own),
    }


def _task(row: Row) -> str:
    return row.get("presets.task") or row["task"]


def _method(row: Row) -> str:
    """Return the module that a row's method is in, or the press of kvpress."""
    return row["presets.method"] if row["method"] == PRESS else row["method"]


def _setting(row: Row) -> str:
    """Return whose parameters a row has: its authors', those that a search found (tuned), kvpress's, or others."""
    preset = row["presets.method"]
    changed = row["label"] != preset or (preset in _catalogue() and _catalogue()[preset].base)
    own = "tuned" if preset.endswith("_tuned") else "other" if changed else "authors'"
    return {FULL: REFERENCE, PRESS: PRESS}.get(row["method"], own)


def _kinds(row: Row) -> list[str]:
    """Return how a row's method saves, by the rule on its card and the row's codec; several for a composition."""
    entry = _catalogue().get(row["presets.method"]) or _catalogue().get(row["method"])
    rule = entry.facts().get("rule", "") if entry else ""
    if " codec=" in row["command"]:
        rule += " bits"
    return [kind for kind, pattern in KINDS.items() if re.search(pattern, rule)] or [
        "reads everything"
    ]


def command_of(row: Row) -> str | None:
    """Return the command that makes a row again; None if this version lacks its preset."""
    command = re.sub(r"data\.root=\S+", "data.root=DATA", row["command"])
    command = re.sub(r"(.*) threads=(\d+)", r"OMP_NUM_THREADS=\2 \1", command)  # once a setting
    chosen = re.search(r"\bmethod=(\w+)", command)
    return command if chosen and chosen[1] in _catalogue() else None


def _filters(tables: Sequence[PublishedTable]) -> str:
    """Return the form with a choice for each of `_facts`, which the page shows where scripts run."""
    facts = [_facts(table, row) for table in tables for row in table.rows]
    choices = ""
    for name in facts[0]:
        values = sorted({value for known in facts for value in known[name]})
        options = "".join(f"<option>{escape(value)}</option>" for value in values)
        choices += f'<label>{name}<select name="{name}"><option value="">all</option>{options}</select></label>'
    return f'<form class="filters" hidden>{choices}<button type="reset">Reset</button><output></output></form>'


def _section(table: PublishedTable) -> Iterator[str]:
    """Yield the HTML of one table: what it shows, its conditions, and its rows."""
    yield f"<h2>{escape(table.title)}</h2>"
    known = experiments()
    if found := known.get(f"tables/{table.name}") or known.get(f"small/{table.name}"):
        yield f"<p>{escape(found.headline)}</p>"
    yield f"<p class=soft>{escape(_conditions([row.own for row in table.rows]))}</p>"
    more = []
    for word, what in APART.items():
        if repeated := [row.apart[word] for row in table.rows if word in row.apart]:
            more.append(f"{what}: {_conditions(repeated)}")
    used = "".join(row.own.get("stamps", "") for row in table.rows)
    more += [
        f"stamp {stamp}: {meaning}" for stamp, meaning in stamp_meanings().items() if stamp in used
    ]
    if more:
        yield f"<details><summary>Conditions of other columns, and stamps</summary>{listed(more, 'soft')}</details>"
    facts = [_facts(table, row) for row in table.rows]
    attributes = [
        "".join(f' data-{name}="{escape("|".join(values))}"' for name, values in known.items())
        for known in facts
    ]
    shown = ReportTable(f"{table.name}: scores, bytes and times", list(_columns(table, facts)))
    yield table_html(shown, attributes, [_origin(row) for row in table.rows])


def _conditions(rows: Sequence[Row]) -> str:
    """Return the prompts of these rows, the settings that all share, machine, commit and date as text."""
    first = rows[0]
    low, high, middle = (
        _number(first, f"prompt_tokens.{end}") or 0 for end in ("min", "max", "median")
    )
    words = [[word for word in _words(row) if "=" in word] for row in rows]
    shared = [word for word in words[0] if all(word in others for others in words)]
    settings = " ".join(
        word for word in shared if not word.startswith(("method", "model=", "data.root="))
    )
    machine = ", ".join(dict.fromkeys([_among(rows, "device_name"), _among(rows, "cpu")]))
    dates = f"{_among(rows, 'started', 10)}, {_among(rows, 'ended', 10)}"
    days = sorted(dates.split(", "))
    return (
        f"{first['num_examples']} prompts of {low:.0f} to {high:.0f} tokens (median {middle:.0f}), "
        f"protocol={first['protocol']}, seed={first['seed']}; all rows: {settings}; {machine}, "
        f"threads {_among(rows, 'threads')}, torch {_among(rows, 'torch')}, commit {_among(rows, 'commit', 7)}; "
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}"
    )


def _among(rows: Sequence[Row], key: str, length: int | None = None) -> str:
    """Return the different values of these rows as one text; each of them is cut to `length`."""
    return ", ".join(sorted({(row.get(key) or "unknown")[:length] for row in rows}))


def _columns(
    table: PublishedTable, facts: Sequence[Mapping[str, Sequence[str]]]
) -> Iterator[Column]:
    """Yield the columns of a report's first table, bytes read, and what a row is. Nothing is left empty, but what is
    zero in all rows has no column."""
    metric = (
        PERPLEXITY if any(row.own.get(f"score.averages.{PERPLEXITY}") for row in table.rows) else ""
    )
    comparison = Comparison(table.title, metric, [_entry(row) for row in table.rows])
    reads = [
        _number(row.apart.get("read", row.own), "memory.read_bytes_per_step") for row in table.rows
    ]
    costs = {"NLL\nvs Full": cost_difference(comparison)}  # with its interval
    for column in (*overview(comparison), quantity("read", reads, BYTES, "/step")):
        column = costs.get(column.head, column)
        empty = "none" if column.head == "budget" else "not measured"
        # of differences to it
        at_full = REFERENCE if "full" in column.head.lower() or column.head == "p" else empty
        words = [at_full if row.own["method"] == FULL else empty for row in table.rows]
        if not column.empty or not any(value is not None for value in column.values):
            yield replace(
                column, cells=[cell or word for cell, word in zip(column.cells, words, strict=True)]
            )
    for name in ("setting", "kind"):
        yield Column(name, "", [" + ".join(known[name]) for known in facts], left=True)
    yield Column("stamps", "", [row.own.get("stamps", "") for row in table.rows], left=True)


def _origin(row: PublishedRow) -> str:
    """Return the HTML of a row's last cell: its commands, its scores by group, and its warnings."""
    parts = ""
    sources = {"scores and bytes": row.own}
    sources |= {APART[word]: own for word, own in row.apart.items()}
    for what, source in sources.items():
        gone = (
            f"This version lacks {source['presets.method']}; commit {source.get('commit')} has it."
        )
        command = command_of(source)
        parts += f"<p>{what}</p>" + (
            f"<code>{escape(command)}</code>" if command else f"<p>{escape(gone)}</p>"
        )
    means = []
    for key in row.own:
        group = re.fullmatch(r"score\.groups\.(.+)\.mean", key)
        if group and (mean := _number(row.own, key)) is not None:
            means.append(f"{group[1]} {100 * mean:.1f}")
    warnings = row.own.parsed("warnings", _texts, "JSON list of texts") or []
    warnings += [f"budget not kept: {why}"] if (why := row.own.get("budget.not_kept")) else []
    lines = [f"score by group: {', '.join(means)}"] * bool(means) + warnings
    return f"<details><summary>command{', notes' * bool(warnings)}</summary>{parts}{listed(lines, 'notes')}</details>"
