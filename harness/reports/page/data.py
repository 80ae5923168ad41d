"""What the page shows, as plain values: the tables of the text report, and what only a page has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.reports import noise
from harness.reports.columns import notes
from harness.reports.command import command
from harness.reports.compare import Comparison, Entry
from harness.reports.conditions import conditions
from harness.reports.document import BESIDE, SCORES, Block
from harness.reports.labels import budget
from harness.reports.page.charts import heat_maps, layers, panels, parts
from harness.reports.page.outputs import Room, outputs
from harness.reports.page.words import meaning
from harness.reports.panels import COLOURS
from harness.reports.stamps import caution
from harness.results.pairs import FULL
from harness.results.store import StoredRun
from harness.results.summary_file import method_of

WARNING = "! "


def page_data(tables: Sequence[Comparison], left_out: Sequence[str], made: str) -> dict[str, Any]:
    room = Room()
    shown = [_table(table, room) for table in tables]
    runs = sum(len(table.entries) for table in tables)
    title = ", ".join(dict.fromkeys(table.title.partition(",")[0] for table in tables)) or "no results"
    return {
        "title": f"KV-cache methods: {title}",
        "made": made,
        "runs": runs,
        "left_out": list(left_out),
        "cut": room.sentence,
        "colours": COLOURS,
        "texts": list(room.texts),
        "tables": shown,
    }


def _table(table: Comparison, room: Room) -> dict[str, Any]:
    said, pairs = list(notes(table)), noise.pairs(table)
    least = noise.floor(pairs)
    return {
        "title": table.title,
        "metric": table.metric,
        "conditions": list(conditions(table)),
        "alarms": [{"text": alarm.text, "red": alarm.red} for alarm in table.alarms],
        "warnings": [note.removeprefix(WARNING) for note in said if note.startswith(WARNING)],
        "notes": [note for note in said if not note.startswith(WARNING)],
        "noise": noise.sentence(pairs) if table.tested else None,
        "floor": least,
        "caution": caution(table),
        "rows": _rows(table, least),
        "blocks": [made for block in (SCORES, *BESIDE) if (made := _block(block, table))],
        "panels": panels(table),
        "heat": heat_maps(table),
        "layers": layers(table),
        "parts": parts(table),
        "outputs": outputs(table, room),
    }


def _block(block: Block, table: Comparison) -> dict[str, Any] | None:
    """A table cell by cell. `run`: the place of the run that a column belongs to, `runs`: those of the rows."""
    columns = block.columns(table)
    if not columns:
        return None
    first = len(columns) - len(table.entries)  # where there is a column per run, they are the last
    shown = [
        {
            "head": "method" if place == 0 and block.of.endswith("rows") else column.head,  # the caption says the rest
            "unit": column.unit,
            "means": meaning(column.head),
            "left": column.left,
            "cells": column.cells,
            "values": list(column.values),
            "run": place - first if block.of == "columns" and place >= first else None,
        }
        for place, column in enumerate(columns)
        if not column.empty
    ]
    return {
        "name": block.name,
        "caption": block.caption,
        "note": block.below(table),
        "of": block.of,
        "runs": block.runs(table),
        "columns": shown,
    }


def _rows(table: Comparison, least: float | None) -> list[dict[str, Any]]:
    lines = sorted({entry.label for entry in table.entries if method_of(entry.run) != FULL})
    holds = table.significant
    return [_row(entry, lines, i in holds, least) for i, entry in enumerate(table.entries)]


def _row(entry: Entry, lines: Sequence[str], holds: bool, least: float | None) -> dict[str, Any]:
    row = entry.summary
    full = method_of(entry.run) == FULL
    return {
        "label": entry.label,
        "title": entry.title,
        "budget": budget(row),
        "full": full,
        "line": None if full else lines.index(entry.label),
        "status": row["status"],
        "score": row["score"]["mean"],
        "ci": row["score"]["ci95"],
        "beside": row["full"] and {key: row["full"][key] for key in ("diff", "ci95", "p")},
        "holds": holds,
        "grey": noise.within_noise(entry, least),
        "command": command(entry.run),
        "facts": _facts(entry.run),
        "warnings": row["warnings"],
    }


def _facts(run: StoredRun) -> list[tuple[str, str]]:
    """Provenance, a line per subject; what an older run does not know is left out."""
    known = run.info.get("provenance") or {}
    machine, git = known.get("machine") or {}, known.get("git") or {}
    commit = git.get("commit") and f"{git['commit']}{' (dirty)' * bool(git.get('dirty'))}"
    versions = [f"{name} {version}" for name, version in (known.get("versions") or {}).items() if version]
    data = {key: value for key, value in (run.info.get("task_info") or {}).items() if key not in ("chance", "metric")}
    found = {
        "folder": run.folder.name,
        "status": run.info.get("error") or run.status,
        "commit": commit,
        "machine": _listed(machine, ("device_name", "cpu", "platform")),
        "cores and threads": _counted(machine, ("cores", "threads", "load_average")),
        "versions": ", ".join(versions),
        "dtype, device, batch, seed": _listed(run.config, ("dtype", "device", "batch", "seed")),
        "kernels": ", ".join(f"{name}: {'/'.join(used)}" for name, used in (run.info.get("backends") or {}).items()),
        "task and data": _counted(data, list(data)),
        "run": " to ".join(str(run.info[key]) for key in ("started", "ended") if run.info.get(key)),
        "identity": run.info.get("identity_sha256"),
    }
    return [(name, str(value)) for name, value in found.items() if value]


def _listed(known: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(str(known[key]) for key in keys if known.get(key) is not None)


def _counted(known: Mapping[str, Any], keys: Sequence[str]) -> str:
    told = {key.replace("_", " "): known.get(key) for key in keys}
    return ", ".join(f"{name} {value}" for name, value in told.items() if value not in (None, "", [], {}))
