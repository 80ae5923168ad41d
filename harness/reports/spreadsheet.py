"""All of every summary as CSV, raw: 0-1, seconds, bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.config.catalogue import flatten
from harness.config.plugins import TARGET
from harness.reports.command import command
from harness.reports.compare import Comparison, ReportRow
from harness.reports.conditions import origin
from harness.reports.stamps import stamps


def table_rows(tables: Sequence[Comparison]) -> list[dict[str, Any]]:
    """A line per run: its summary, its p after the table's correction (`full.p_holm`), its method's parameters as
    `parameters.NAME`, where and how it ran."""
    return [_row(place, entry, table) for table in tables for place, entry in enumerate(table.entries)]


def _row(place: int, entry: ReportRow, table: Comparison) -> dict[str, Any]:
    info = entry.run.info
    known = {key: value for key, value in entry.summary.items() if value is not None}
    parameters = {name: value for name, value in entry.run.config["method"].items() if name != TARGET}
    return dict(cells(known | {"parameters": parameters})) | {
        "label": entry.label,
        "stamps": stamps(entry, table),
        "full.p_holm": table.adjusted.get(place),
        "likelihood.full.p_holm": table.adjusted_costs.get(place),
        "folder": entry.run.folder.name,
        "started": info.get("started"),
        "ended": info.get("ended"),
        **origin(entry.run),
        "command": command(entry.run),
    }


def cells(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys; an interval becomes `.low` and `.high`, other lists are JSON."""
    for key, value in flatten(summary).items():
        if key.rpartition(".")[2] == "ci95":
            yield from zip((f"{key}.low", f"{key}.high"), value or (None, None), strict=True)
        else:
            yield key, json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
