"""All pictures of a report: the differences to Full, score against cost, where needles were found and where lost."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from harness.reports import needles
from harness.reports.compare import Comparison
from harness.reports.costs import SummaryRow
from harness.reports.pictures import differences, frontier, heatmap
from harness.reports.stamps import stamps

LONGEST = 120  # characters of a picture's name


def draw(tables: Sequence[Comparison], folder: Path) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    for number, table in enumerate(tables, 1):
        whole = partial(_picture, folder, f"{number}-{table.title}")
        rows = priced(table)
        if any(map(table.beside, table.entries)):
            yield from differences.differences(table, whole("differences"), table.title)
        if frontier.has_frontier(rows) and not table.of_perplexity:
            yield from frontier.frontier(rows, whole("frontier"), table.title)
        yield from _needles(number, table, folder)


def priced(table: Comparison) -> list[SummaryRow]:
    """The rows of a table as `frontier` takes them."""
    return [
        entry.summary | {"label": entry.label + entry.unfinished, "stamps": stamps(entry, table)}
        for entry in table.entries
    ]


def _needles(number: int, table: Comparison, folder: Path) -> Iterator[Path]:
    """Per task, a picture of all runs where they have one length, else one of each."""
    tasks: dict[str, dict[int, list[needles.NeedleScore]]] = defaultdict(dict)
    for place, entry in enumerate(table.entries):
        for task, found in needles.by_task(entry.run.records).items():
            tasks[task][place] = found
    for task, by_place in tasks.items():
        named = {place: table.entries[place].title + table.entries[place].unfinished for place in by_place}
        grids = {named[place]: needles.grid(found) for place, found in by_place.items()}
        if heatmap.is_flat(list(grids.values())):
            path = _picture(folder, f"{number}-{table.title}", f"{_slug(task)}-heatmap")
            yield from heatmap.by_run(grids, path, f"{task}: {table.title}")
            continue
        for place, found in by_place.items():
            path = _picture(folder, f"{number}-{place + 1}-{table.entries[place].title}", f"{_slug(task)}-heatmap")
            yield from heatmap.heatmap(found, path, f"{named[place]}, {task}: {table.title}")


def _picture(folder: Path, name: str, kind: str) -> Path:
    """The numbers in front make names differ, however much of the rest a file system leaves room for."""
    return folder / f"{_slug(name)[:LONGEST]}-{kind}.png"


def _slug(text: str) -> str:
    text = re.sub(r"[][(){}'\"]", "", text)  # lengths=[512] is lengths=512, not lengths=-512
    return re.sub(r"[^A-Za-z0-9.=]+", "-", text).strip("-")
