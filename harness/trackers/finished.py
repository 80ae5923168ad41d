"""Run folders as trackers get them: side by side in their tables, with pictures and the table as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.config.nested import flatten
from harness.config.settings import WITHOUT_EFFECT
from harness.reports import needles
from harness.reports.compare import Comparison, ReportRow, comparisons
from harness.reports.document import as_text
from harness.reports.pictures import frontier, heatmap
from harness.reports.pictures.draw import priced
from harness.reports.spreadsheet import cells
from harness.results import files
from harness.results.folder.names import CONFIG, INFO, SUMMARY
from harness.results.run_folder import load_all
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


def _finished(entry: ReportRow, pictures: Mapping[str, Path], table: str, file: Path) -> FinishedRun:
    folder, told = entry.run.folder, flatten(entry.summary)
    config = {key: value for key, value in entry.run.config.items() if key not in WITHOUT_EFFECT}
    return FinishedRun(
        folder=folder,
        config=flatten(config),
        numbers={key: float(value) for key, value in cells(entry.summary) if isinstance(value, (int, float))},
        words={key: value for key, value in told.items() if isinstance(value, str)} | {"label": entry.title},
        pictures=pictures,
        table=table,
        files=[*(folder / name for name in KEPT if (folder / name).is_file()), file],
    )


def _frontier(table: Comparison, place: Path) -> dict[str, Path]:
    rows, path = priced(table), place / "frontier.png"
    return {"frontier": frontier.frontier(rows, path, table.title)[0]} if frontier.has_frontier(rows) else {}


def _heatmaps(entry: ReportRow, place: Path, row: int) -> dict[str, Path]:
    drawn = {}
    for number, (task, found) in enumerate(needles.by_task(entry.run.records).items()):
        path = place / f"{row}-{number}-heatmap.png"
        heatmap.heatmap(found, path, f"{entry.title}, {task}")
        drawn[f"heatmap/{task}"] = path
    return drawn
