"""`python -m harness.report DIR...`: one row per run, one table per task, model and protocol; to CSV and PNG too."""

from __future__ import annotations

import argparse
import csv
import json
import re
import signal
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.config.nested import flatten
from harness.reports.banner import banner, markdown_banner, shows_colour
from harness.reports.columns import average_table, group_table, notes, score_table, trace_table
from harness.reports.compare import Comparison, Entry, comparisons
from harness.reports.conditions import conditions, origin
from harness.results import files
from harness.results.records import StoreError
from harness.results.store import StoredRun, find, load
from harness.terminal.tables import Column, markdown_table, text_table

WIDTH = 160
LONGEST = 120  # characters of a picture's name
# name on the command line -> key in summary.json, best first
SORTS = {
    "score": ("score.mean", True),
    "diff": ("full.diff", True),
    "p": ("full.p", False),
    "attended": ("budget.attended.share", False),
    "ttft": ("ttft_s.p50", False),
    "tt2t": ("tt2t_s.p50", False),
    "tpot": ("tpot_s.p50", False),
    "throughput": ("throughput_tok_s", True),
    "device": ("memory.kv_device_bytes", False),
    "host": ("memory.kv_host_bytes", False),
    "moved": ("memory.moved_bytes_per_step", False),
    "n": ("num_examples", True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        runs, unreadable = _load(find(options.folders))
        shown = [run for run in runs if not run.is_empty]
        tables = comparisons(shown)
        print(_document(tables, options.sort, colour=shows_colour(sys.stdout)))
        if len(shown) < len(runs):
            print(_empty([run for run in runs if run.is_empty]))
        if options.md:
            files.write_atomically(options.md, _document(tables, options.sort, markdown=True) + "\n")
        if options.csv:
            _write_csv(options.csv, tables)
        if options.plots:
            print(*(f"drew {path}" for path in _draw(tables, options.folders[0] / "plots")), sep="\n")
    except StoreError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cannot write {error.filename}: {files.reason(error)}", file=sys.stderr)
        return 2
    for message in unreadable:
        print(f"left out: {message}", file=sys.stderr)
    return 2 if unreadable else 0


def _empty(runs: Sequence[StoredRun]) -> str:
    """Folders without a row, in one line."""
    named = ", ".join(f"{run.folder.name} ({run.info.get('error') or run.status})" for run in runs)
    return " ".join(f"without a single example, and so in no table: {named}".split())


def print_report(folders: Sequence[Path]) -> None:
    """The tables of these runs, as at the end of a command that ran them."""
    tables = comparisons([load(folder) for folder in folders])
    print("\n" + _document(tables, colour=shows_colour(sys.stdout)))


def _document(
    tables: Sequence[Comparison], sort: str | None = None, *, markdown: bool = False, colour: bool = False
) -> str:
    render = markdown_table if markdown else text_table
    parts = []
    for table in (_sorted(table, sort) for table in tables):
        parts += [f"### {table.title}\n" if markdown else table.title]
        parts += markdown_banner(table) if markdown else banner(table, WIDTH, colour)
        parts += [f"{line}<br>" if markdown else _wrapped(line) for line in conditions(table)]
        parts += ["", render(score_table(table)), ""]
        parts += [f"- {note}" if markdown else _wrapped(note) for note in notes(table)]
        for columns, head in ((trace_table(table), 2), (group_table(table), 2), (average_table(table), 1)):
            for block in _blocks(columns, head):
                parts += ["", render(block)]
        parts.append("")
    return "\n".join(parts).rstrip()


def _wrapped(note: str) -> str:
    return textwrap.fill(note, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _blocks(columns: Sequence[Column], head: int) -> Iterator[list[Column]]:
    """A wide table in pieces that fit; the first `head` columns head each."""
    block = list(columns[:head])
    for column in columns[head:]:
        if len(block) > head and sum(kept.width + 2 for kept in [*block, column]) > WIDTH:
            yield block
            block = list(columns[:head])
        block.append(column)
    if len(block) > head:
        yield block


def _sorted(table: Comparison, sort: str | None) -> Comparison:
    if sort is None:
        return table
    key, descending = SORTS[sort]
    values = [(flatten(entry.summary).get(key), entry) for entry in table.entries]
    known = [(float(value), entry) for value, entry in values if value is not None]
    known.sort(key=lambda pair: pair[0], reverse=descending)
    entries = [entry for _, entry in known] + [entry for value, entry in values if value is None]
    return Comparison(table.title, table.metric, entries)


def _load(folders: Sequence[Path]) -> tuple[list[StoredRun], list[str]]:
    """Runs that can be read, and what is wrong with the others."""
    runs, unreadable = [], []
    for folder in folders:
        try:
            runs.append(load(folder))
        except StoreError as error:
            unreadable.append(str(error))
    if not runs:
        raise StoreError(unreadable[0])
    return runs, unreadable


def _write_csv(path: Path, tables: Sequence[Comparison]) -> None:
    """All of every summary, raw: 0-1, seconds, bytes."""
    rows = [_csv_row(entry) for table in tables for entry in table.entries]
    names = dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(rows)


def _csv_row(entry: Entry) -> dict[str, Any]:
    info = entry.run.info
    known = {key: value for key, value in entry.summary.items() if value is not None}
    return dict(_cells(known)) | {
        "label": entry.label,
        "folder": entry.run.folder.name,
        "started": info.get("started"),
        "ended": info.get("ended"),
        **origin(entry.run),
    }


def _cells(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys; an interval becomes `.low` and `.high`, other lists are JSON."""
    for key, value in flatten(summary).items():
        if key.rpartition(".")[2] == "ci95":
            yield from zip((f"{key}.low", f"{key}.high"), value or (None, None), strict=True)
        else:
            yield key, json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


def _draw(tables: Sequence[Comparison], folder: Path) -> Iterator[Path]:
    from harness.reports import frontier, heatmap

    folder.mkdir(exist_ok=True)
    for number, table in enumerate(tables, 1):
        rows = [entry.summary | {"label": entry.label + _unfinished(entry)} for entry in table.entries]
        if frontier.has_frontier(rows):
            path = _picture(folder, f"{number}-{table.title}", "frontier")
            frontier.frontier(rows, path, table.title)
            yield path
        for place, entry in enumerate(table.entries, 1):
            for task, needles in heatmap.by_task(entry.run.records).items():
                path = _picture(folder, f"{number}-{place}-{entry.title}", f"{_slug(task)}-heatmap")
                heatmap.heatmap(needles, path, f"{entry.title}{_unfinished(entry)}, {task}: {table.title}")
                yield path


def _picture(folder: Path, name: str, kind: str) -> Path:
    """The numbers in front make names differ, however much of the rest a file system leaves room for."""
    return folder / f"{_slug(name)[:LONGEST]}-{kind}.png"


def _unfinished(entry: Entry) -> str:
    return "" if entry.summary["status"] == "complete" else " (incomplete)"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=]+", "-", text).strip("-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m harness.report", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folder of a run, or any above it")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="all of every summary, raw numbers")
    parser.add_argument("--md", type=Path, metavar="FILE", help="the same tables in Markdown")
    parser.add_argument("--sort", choices=list(SORTS), help="best first; without it Full first, then by name")
    parser.add_argument("--plots", action="store_true", help="score against cost, needle heat maps: PNG in DIR/plots")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program, not with a traceback
    sys.exit(main())
