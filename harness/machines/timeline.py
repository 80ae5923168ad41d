"""Draws a replayed schedule lane by lane, and writes it for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.machines.replay import ScheduleTimes
from harness.machines.schedule import LANES
from harness.results.files import write_atomically

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#999999")


def chrome_trace(times: ScheduleTimes) -> dict[str, Any]:
    """The trace as an object of Chrome's trace format: a thread per lane, times in microseconds."""
    used = {span.lane for span in times.spans}
    names = [
        {"ph": "M", "pid": 0, "tid": LANES.index(lane), "name": "thread_name", "args": {"name": lane}}
        for lane in LANES
        if lane in used
    ]
    events = [
        {
            "ph": "X",
            "pid": 0,
            "tid": LANES.index(span.lane),
            "name": span.name,
            "ts": 1e6 * span.start,
            "dur": 1e6 * (span.end - span.start),
            "args": {"layer": span.layer},
        }
        for span in times.spans
    ]
    tokens = [
        {"ph": "i", "pid": 0, "tid": 0, "s": "p", "name": f"token {number}", "ts": 1e6 * at}
        for number, at in enumerate(times.token_s, start=1)
    ]
    return {"traceEvents": [*names, *events, *tokens], "displayTimeUnit": "ms"}


def write_trace(file: Path, times: ScheduleTimes) -> None:
    write_atomically(file, json.dumps(chrome_trace(times)) + "\n")


def picture(file: Path, times: ScheduleTimes, title: str) -> None:
    """A row of bars for each lane that worked. Needs matplotlib."""
    from matplotlib.figure import Figure

    lanes = [lane for lane in LANES if any(span.lane == lane for span in times.spans)]
    figure = Figure(figsize=(10, 1.0 + 0.5 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for row, lane in enumerate(lanes):
        bars = [(1e3 * span.start, 1e3 * (span.end - span.start)) for span in times.spans if span.lane == lane]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=COLOURS[LANES.index(lane)], edgecolor="white", linewidth=0.2)
    for at in times.token_s:
        axes.axvline(1e3 * at, color="#222222", linewidth=0.8)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set(xlabel="ms", title=title, xlim=(0, None))
    figure.savefig(file, dpi=120)
