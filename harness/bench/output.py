"""Where a benchmark goes: a table on the screen and in a file, all figures as JSON, one picture."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill
from typing import Any

from harness.bench.measure import Estimate
from harness.provenance import provenance
from harness.tables import Column, digits, markdown_table, text_table

ROOT = Path("results/runs/bench")
PLACES = ("out", "python", "data_root")  # options that say where things lie on this machine, and so are not written
Row = Mapping[str, Any]


def measured(rows: Sequence[Row]) -> list[Row]:
    """Those without an error; it is raised where there are no others."""
    good = [row for row in rows if "error" not in row]
    if not good:
        raise ValueError(f"Nothing could be measured: {rows[0]['error']}")
    return good


def column(head: str, unit: str, rows: Sequence[Row], cell: Callable[[Row], Any], left: bool = False) -> Column:
    """Numbers with three digits, an estimate as "median low-high"; None is empty."""
    return Column(head, unit, [_text(cell(row)) for row in rows], left)


def finish(kind: str, title: str, options: Namespace, result: Mapping[str, Any], columns: Sequence[Column]) -> Path:
    """Prints the table and writes result.json and table.md; returns the folder, where a picture may follow."""
    asked = {name: value for name, value in vars(options).items() if name not in PLACES}
    folder = options.out or ROOT / f"{kind}-{datetime.now(UTC):%Y%m%dT%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    stamp = provenance(str(asked.get("device", "cpu")))
    plain = {"schema": 1, "kind": kind, "title": title, "options": asked, **result, "provenance": stamp}
    (folder / "result.json").write_text(json.dumps(plain, indent=1) + "\n")
    (folder / "table.md").write_text(f"{title}\n\n{markdown_table(columns)}\n")
    print(f"\n{title}\n\n{text_table(columns)}\n\nload average {os.getloadavg()[0]:.2f}; written to {folder}")
    return folder


def lines(path: Path, rows: Sequence[Row], *, x: str, y: str, series: str, labels: tuple[str, str], title: str) -> None:
    """One line per series over x, both axes logarithmic, intervals as bands. Left out where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row[series] for row in rows))
    for place, name in enumerate(names):
        points = sorted((row[x], *row[y]) for row in rows if row[series] == name and row[y])
        at, middle, low, high = zip(*points, strict=True) if points else ((), (), (), ())
        axes.plot(at, middle, "osD^vPX"[place % 7] + "-", label=name, linewidth=1.2, markersize=4)
        axes.fill_between(at, low, high, alpha=0.15)
    axes.set(xscale="log", yscale="log", xlabel=labels[0], ylabel=labels[1], title=_wrapped(title))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}K" if value >= 1024 else f"{value:g}")
    axes.set_xticks(sorted({row[x] for row in rows}), minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(_plain)
    axes.yaxis.set_minor_formatter(_plain)
    axes.tick_params(axis="y", which="minor", labelsize=7)
    axes.grid(True, which="major", color="#e3e3e3")
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=120)


def bars(path: Path, rows: Sequence[Row], *, label: str, y: str, unit: str, title: str) -> None:
    """One bar per row with its interval."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    shown = [row for row in rows if row[y]]
    figure = Figure(figsize=(8, 0.3 * len(shown) + 1.2), layout="constrained")
    axes = figure.subplots()
    places = range(len(shown))
    middles = [row[y][0] for row in shown]
    errors = [[row[y][0] - row[y][1] for row in shown], [row[y][2] - row[y][0] for row in shown]]
    axes.barh(places, middles, xerr=errors, color="#56b4e9", ecolor="#666666")
    axes.set_yticks(places, [row[label] for row in shown], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="#222222", linewidth=0.8)
    axes.set(xlabel=unit, title=_wrapped(title), xlim=(0, None))
    axes.grid(True, axis="x", color="#e3e3e3")
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=120)


def _plain(value: float, _: float) -> str:
    return f"{value:g}"


def _wrapped(title: str) -> str:
    return fill(title, 90)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (tuple, list)):
        middle, low, high = Estimate(*value)
        return f"{digits(middle)} {digits(low)}-{digits(high)}"
    return value if isinstance(value, str) else digits(value)
