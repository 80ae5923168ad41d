"""What the page shows, as plain values: the tables of the text report, and what only a page has room for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from evals.stats import ALPHA
from harness.engine.step_parts import PARTS
from harness.reports import costs, needles, overview
from harness.reports.columns import notes
from harness.reports.command import command
from harness.reports.compare import Comparison, ReportRow
from harness.reports.conditions import conditions, shared
from harness.reports.costs import COLOURS, PANELS, Panel
from harness.reports.document import OTHER_TABLES, OVERVIEW, SCORES, TableKind
from harness.reports.labels import budget
from harness.reports.page.outputs import Room, outputs
from harness.reports.stamps import caution
from harness.results.compared import FULL
from harness.results.measures import MEASURES
from harness.results.records import Record
from harness.results.run_folder import StoredRun
from harness.results.summary import method_of
from methods.tiers.tier import TIERS

WARNING = "! "
UNCUT = 10**6  # characters: a browser wraps its lines


def page_data(tables: Sequence[Comparison], left_out: Sequence[str], made: str) -> dict[str, Any]:
    room, everywhere = Room(), shared(tables)
    shown = [_table(table, room, everywhere) for table in tables]
    runs = sum(len(table.entries) for table in tables)
    title = ", ".join(dict.fromkeys(table.title.partition(",")[0] for table in tables)) or "no results"
    return {
        "title": f"KV-cache methods: {title}",
        "made": made,
        "runs": runs,
        "conditions": "; ".join(everywhere.values()),
        "left_out": list(left_out),
        "cut": room.sentence,
        "colours": COLOURS,
        "texts": list(room.texts),
        "tables": shown,
    }


def _table(table: Comparison, room: Room, everywhere: Mapping[str, str]) -> dict[str, Any]:
    said = list(notes(table))
    return {
        "title": table.title,
        "metric": table.metric,
        "lines": overview.lines(table, rest="below", width=UNCUT),
        "conditions": list(conditions(table, apart=everywhere)),
        "alarms": [{"text": alarm.text, "red": alarm.red} for alarm in table.alarms],
        "warnings": [note.removeprefix(WARNING) for note in said if note.startswith(WARNING)],
        "notes": [note for note in said if not note.startswith(WARNING)],
        "points": not table.of_perplexity,
        "caution": caution(table),
        "rows": _rows(table),
        "blocks": [made for block in (OVERVIEW, SCORES, *OTHER_TABLES) if (made := _block(block, table))],
        "panels": panels(table),
        "heat": heat_maps(table),
        "layers": layers(table),
        "parts": parts(table),
        "outputs": outputs(table, room),
    }


def _block(block: TableKind, table: Comparison) -> dict[str, Any] | None:
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


def _rows(table: Comparison) -> list[dict[str, Any]]:
    lines = sorted({entry.label for entry in table.entries if method_of(entry.run) != FULL})
    holds = table.significant_costs if table.of_perplexity else table.significant
    return [
        _row(entry, lines, i in holds, table.beside(entry)) | ({"score": None} if table.of_perplexity else {})
        for i, entry in enumerate(table.entries)
    ]


def _row(entry: ReportRow, lines: Sequence[str], holds: bool, beside: Mapping[str, Any] | None) -> dict[str, Any]:
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
        "beside": beside and {key: beside[key] for key in ("diff", "ci95", "p")},
        "holds": holds,
        "grey": beside is not None and beside["p"] >= ALPHA,
        "command": command(entry.run),
        "facts": _facts(entry.run),
        "warnings": row["warnings"],
    }


def _facts(run: StoredRun) -> list[tuple[str, str]]:
    """Provenance, a line per subject; what an older run does not know is left out."""
    machine, git = run.provenance("machine"), run.provenance("git")
    commit = git.get("commit") and f"{git['commit']}{' (dirty)' * bool(git.get('dirty'))}"
    versions = [f"{name} {version}" for name, version in run.provenance("versions").items() if version]
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


def panels(table: Comparison) -> list[dict[str, Any]]:
    """Score against each cost that can be compared; `front`: complete rows that nothing beats."""
    rows = [entry.summary for entry in table.entries]
    return [] if table.of_perplexity else [_panel(panel, table) for panel in PANELS if panel.shows(rows)]


def _panel(panel: Panel, table: Comparison) -> dict[str, Any]:
    rows = [entry.summary for entry in table.entries]
    xs = [panel.cost(row) or None for row in rows]
    scores = [row["score"]["mean"] if row["status"] == "complete" else None for row in rows]
    points = [(x, score) if x and score is not None else None for x, score in zip(xs, scores, strict=True)]
    return {"name": panel.name, "log": panel.log, "timed": panel.timed, "xs": xs, "front": sorted(costs.front(points))}


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
    """Yield the mean recall per layer of each example."""
    for record in records:
        if record.fidelity and record.fidelity.get("recall_per_head"):
            yield [fmean(heads) for heads in record.fidelity["recall_per_head"]]


def parts(table: Comparison) -> list[dict[str, Any]]:
    """Milliseconds of each part of a decode step, of traced runs."""
    traced = [(i, entry.summary["trace"]) for i, entry in enumerate(table.entries) if entry.summary["trace"]]
    return [{"row": i, "ms": {part: 1000 * trace[f"{part}_s"] for part in PARTS}} for i, trace in traced]


_MEANINGS = {
    "budget": "prompt tokens that a head may read per step, as asked: a share or a number",
    "vs full": "difference to Full on the same prompts, in points",
    "p": "paired test against Full, uncorrected; * holds after Holm's correction",
    "n": "examples",
    "found": "smallest loss that these examples show with 80 % power",
    "examples for": "examples that would show a loss of so many points with 80 % power",
    "perplexity": "exp of the mean cost per token, the smaller the better",
    "NLL": "cost of the right answer, in nats per token behind the seal",
    "NLL vs full": "how much more the right answer costs than under Full, in nats per token, by the signed-rank test",
    "mean": "mean difference to Full in nats per token, which a few failed prompts may make",
    "stamps": "conditions to know before comparing, a letter each",
    "attended": "share of the prompt that a head read per step",
    "read per\nKV head\n(union)": "share of the prompt that a KV head read for all its query heads, each token once",
    "recall": "of the prompt tokens with the largest weights, as many as were read, the share that was",
    "mass": "share of the exact attention weight that lies on the tokens read",
    "KL": "divergence between the next-token distributions of Full and the method on the same text",
    "TTFT": "time to the first token, prefill included; median",
    "TTFT\nlater": "time to the first token of a further turn or question, from its own start; median",
    "TT2T": "time to the second token, seal included; median",
    "TPOT p50/90": "time per output token behind the second: median and 90th percentile",
    "decode": "tokens per second behind the second token",
    "read\nof Full's": "of what Full read on the same examples",
    "found in": "tier in which a turn found its history",
    "lost": "turns whose stored history was gone, where computing it again changed what the method holds",
    "reused": "tokens of its history that a turn found",
    "computed": "tokens that a turn prefilled, its own prompt among them",
    "load": "time that a turn waited for its history, within its TTFT",
    "hidden": "time in which layers of its history came while it computed",
    "save": "time in which a turn was stored behind its last token",
    "save hidden": "time in which its rows left the device while nobody waited",
}


def meaning(head: str) -> str | None:
    """Return what a column's head means; TIERS explains bytes held, and MEASURES the numbers of a step."""
    held = {tier.head: tier.meaning for tier in TIERS.values()}
    measured = {measure.head: measure.shown for measure in MEASURES.values() if measure.head}
    return (_MEANINGS | held | measured).get(head)
