"""Numbers behind the page's charts; `row` is the place of a run in its table."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from harness.engine.step_parts import PARTS
from harness.reports import needles, pareto
from harness.reports.compare import Comparison
from harness.reports.panels import PANELS, Panel
from harness.results.records import Record


def panels(table: Comparison) -> list[dict[str, Any]]:
    """Score against each cost that can be compared; `front`: complete rows that nothing beats."""
    rows = [entry.summary for entry in table.entries]
    return [_panel(panel, table) for panel in PANELS if panel.shows(rows)]


def _panel(panel: Panel, table: Comparison) -> dict[str, Any]:
    rows = [entry.summary for entry in table.entries]
    xs = [panel.cost(row) or None for row in rows]
    scores = [row["score"]["mean"] if row["status"] == "complete" else None for row in rows]
    points = [(x, score) if x and score is not None else None for x, score in zip(xs, scores, strict=True)]
    return {"name": panel.name, "log": panel.log, "timed": panel.timed, "xs": xs, "front": sorted(pareto.front(points))}


def heat_maps(table: Comparison) -> list[dict[str, Any]]:
    return [
        {"row": i, "task": task, **needles.grid(found)._asdict()}
        for i, entry in enumerate(table.entries)
        for task, found in needles.by_task(entry.run.records).items()
    ]


def layers(table: Comparison) -> list[dict[str, Any]]:
    """Recall per layer, mean over KV heads and examples, where fidelity was recorded."""
    found = [(i, list(_recall(entry.run.records))) for i, entry in enumerate(table.entries)]
    return [
        {"row": i, "recall": [round(fmean(layer), 4) for layer in zip(*examples, strict=True)]}
        for i, examples in found
        if examples
    ]


def _recall(records: list[Record]) -> Iterator[list[float]]:
    """Of each example, a mean per layer."""
    for record in records:
        if record.fidelity and record.fidelity.get("recall_per_head"):
            yield [fmean(heads) for heads in record.fidelity["recall_per_head"]]


def parts(table: Comparison) -> list[dict[str, Any]]:
    """Milliseconds of each part of a decode step, of traced runs."""
    traced = [(i, entry.summary["trace"]) for i, entry in enumerate(table.entries) if entry.summary["trace"]]
    return [{"row": i, "ms": {part: 1000 * trace[f"{part}_s"] for part in PARTS}} for i, trace in traced]
