"""Prepares finished runs for copying: their numbers, the pictures, and the table in which they stand as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.catalogue import flatten
from harness.config.settings import WITHOUT_EFFECT
from harness.reports.compare import comparisons
from harness.reports.document import as_markdown, cells
from harness.reports.pictures import figures
from harness.reports.pictures.frontier import frontier, has_frontier
from harness.reports.pictures.heatmap import heatmap, needles_by_task
from harness.results import files
from harness.results.run_folder import CONFIG, INFO, SUMMARY, load_all
from harness.terminal.notices import say_once

KEPT = (SUMMARY, INFO, CONFIG)


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """Hold what is copied of one finished run: its config, numbers, pictures and files. Keys are
    dotted, as in the CSV of a report."""

    folder: Path
    config: Mapping[str, Any]  # flat; values as yaml has them
    numbers: Mapping[str, float]  # of summary.json: scores 0-1 (groups, intervals), seconds, bytes
    words: Mapping[str, str]  # of summary.json: method, task, status ...
    pictures: Mapping[str, Path]  # PNG: heat maps of the run, the frontier of its table
    files: Sequence[Path]  # summary.json, run.json, config.yaml, and the table with its notes and alarms as table.md


def finished(folders: Sequence[Path], scratch: Path) -> Iterator[FinishedRun]:
    """Yield what is to be copied of the runs in these folders. `scratch`: an existing folder for
    their pictures and tables, which must stay until they are sent."""
    runs, damage = load_all(folders)
    for text in damage:
        say_once(f"not sent: {text}")
    for number, table in enumerate(comparisons(runs)):
        place = scratch / str(number)
        place.mkdir()
        files.write_atomically(place / "table.md", as_markdown([table]))
        shared = dict[str, Path]()
        if has_frontier(table):
            shared["frontier"] = figures.save(frontier(table), place / "frontier.png")[0]
        for row, entry in enumerate(table.entries):
            drawn = dict[str, Path]()
            for task, needles in needles_by_task(entry.run.records).items():
                drawn[f"heatmap/{task}"] = path = place / f"{row}-{len(drawn)}-heatmap.png"
                figures.save(heatmap(needles, f"{entry.title}, {task}"), path)
            folder, summary = entry.run.folder, flatten(entry.summary)
            config = {key: value for key, value in entry.run.config.items() if key not in WITHOUT_EFFECT}
            yield FinishedRun(
                folder=folder,
                config=flatten(config),
                numbers={key: float(value) for key, value in cells(entry.summary) if isinstance(value, (int, float))},
                words={key: value for key, value in summary.items() if isinstance(value, str)} | {"label": entry.title},
                pictures=shared | drawn,
                files=[*(folder / name for name in KEPT if (folder / name).is_file()), place / "table.md"],
            )
