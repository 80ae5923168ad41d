"""Run folders as trackers get them: side by side in their tables, with pictures and the table as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.config.nested import flatten
from harness.config.settings import WITHOUT_EFFECT
from harness.reports import needles
from harness.reports.compare import Comparison, Entry, comparisons
from harness.reports.document import as_text
from harness.reports.pictures import frontier, heatmap
from harness.reports.stamps import stamps
from harness.results import files
from harness.results.folder.names import CONFIG, INFO, SUMMARY
from harness.results.store import load_all
from harness.terminal.notices import say_once
from harness.trackers.base import FinishedRun

KEPT = (SUMMARY, INFO, CONFIG)


def finished(folders: Sequence[Path], scratch: Path) -> Iterator[FinishedRun]:
    """`scratch` takes the pictures and tables, and must live until they are published."""
    runs, damage = load_all(folders)
    for text in damage:
        say_once(f"not sent: {text}")
    for number, table in enumerate(comparisons(runs)):
        place = scratch / str(number)
        place.mkdir()
        text = as_text([table], markdown=True)
        files.write_atomically(place / "table.md", text + "\n")
        shared = _frontier(table, place)
        for row, entry in enumerate(table.entries):
            pictures = shared | _heatmaps(entry, place, row)
            yield _finished(entry, pictures, text, place / "table.md")


def _finished(entry: Entry, pictures: Mapping[str, Path], table: str, file: Path) -> FinishedRun:
    folder, told = entry.run.folder, flatten(entry.summary)
    config = {key: value for key, value in entry.run.config.items() if key not in WITHOUT_EFFECT}
    return FinishedRun(
        folder=folder,
        config=flatten(config),
        numbers=dict(_numbers(told)),
        words={key: value for key, value in told.items() if isinstance(value, str)} | {"label": entry.title},
        pictures=pictures,
        table=table,
        files=[*(folder / name for name in KEPT if (folder / name).is_file()), file],
    )


def _numbers(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Intervals as two numbers; what is not known is left out."""
    for key, value in summary.items():
        if key.endswith("ci95") and value:
            yield from zip((f"{key}.low", f"{key}.high"), value, strict=True)
        elif isinstance(value, (int, float)):
            yield key, float(value)


def _frontier(table: Comparison, place: Path) -> dict[str, Path]:
    rows = [entry.summary | {"label": entry.label, "stamps": stamps(entry, table)} for entry in table.entries]
    if not frontier.has_frontier(rows):
        return {}
    path = place / "frontier.png"
    frontier.frontier(rows, path, table.title)
    return {"frontier": path}


def _heatmaps(entry: Entry, place: Path, row: int) -> dict[str, Path]:
    drawn = {}
    for number, (task, found) in enumerate(needles.by_task(entry.run.records).items()):
        path = place / f"{row}-{number}-heatmap.png"
        heatmap.heatmap(found, path, f"{entry.title}, {task}")
        drawn[f"heatmap/{task}"] = path
    return drawn
