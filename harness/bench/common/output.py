"""Where a benchmark goes: rows on the screen and in files as they come, all figures as JSON, one picture."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill
from time import perf_counter
from typing import Any

from harness.bench.common.measure import Estimate
from harness.results.files import write_atomically
from harness.results.provenance import now, provenance
from harness.terminal.tables import Column, digits, markdown_table, text_table
from kernels.temporary import remove_abandoned

ROOT = Path("results/runs/bench")
PLACES = ("out", "python", "data_root")  # options that say where things lie on this machine, and so are not written
Row = Mapping[str, Any]
Table = Callable[[Sequence[Row]], list[Column]]  # of rows without an error


class Report:
    """A benchmark's folder. Every row is printed and written when it comes, and each file is replaced as a whole: one
    that is killed leaves what it had measured, marked as partial."""

    def __init__(self, kind: str, title: str, options: Namespace, table: Table, **facts: Any) -> None:
        self.title, self.table, self.minutes = title, table, getattr(options, "minutes", None)
        self.folder: Path = options.out or ROOT / f"{kind}-{datetime.now(UTC):%Y%m%dT%H%M%S}"
        self.rows: list[Row] = []
        self.left_out: list[str] = []
        asked = {name: value for name, value in vars(options).items() if name not in PLACES}
        stamp = provenance(str(asked.get("device", "cpu")))
        self._head = {"schema": 1, "kind": kind, "title": title, "options": asked, **facts, "provenance": stamp}
        self._began = perf_counter()
        for folder in (self.folder, *ROOT.glob(f"{kind}-*")):
            remove_abandoned(folder)  # stores of gigabytes, where an earlier one was killed
        self.folder.mkdir(parents=True, exist_ok=True)
        print(f"{title}\nEach row goes to {self.folder} as it comes.", flush=True)

    def add(self, row: Row, line: str) -> None:
        """`line`: the row as the screen shows it."""
        self.show([*self.rows, row], line)

    def show(self, rows: Sequence[Row], line: str) -> None:
        """In place of the rows so far, for those that grow with every round."""
        self.rows = list(rows)
        self._write("partial")
        print(line + (f" ({mark} samples disturbed)" if (mark := _disturbed(self.rows[-1])) else ""), flush=True)

    def out_of_time(self, what: str) -> bool:
        """Whether --minutes are over, so that `what` is left out."""
        over = self.minutes is not None and perf_counter() - self._began > 60 * self.minutes
        if over:
            self.left_out.append(what)
        return over

    def finish(self) -> list[Row]:
        """Prints the table; returns the rows without an error, for a picture."""
        good = self._good()
        if not good:
            raise ValueError(f"Nothing could be measured: {self.rows[0]['error']}" if self.rows else self._warnings())
        self._write("complete")
        load = os.getloadavg()[0]
        print(f"\n{self.title}\n\n{text_table(self._columns())}\n\n{self._warnings()}load average {load:.2f}; ", end="")
        print(f"written to {self.folder}")
        return good

    def _good(self) -> list[Row]:
        return [row for row in self.rows if "error" not in row]

    def _columns(self) -> list[Column]:
        good = self._good()
        return [*self.table(good), column("disturbed", "", good, _disturbed), column("launches", "", good, _launches)]

    def _warnings(self) -> str:
        """What a reader of the table must know, a sentence per line."""
        disturbed = sum(bool(_disturbed(row)) for row in self._good())
        sentences = []
        if disturbed:
            sentences.append(
                f"{disturbed} of {len(self.rows)} rows hold samples in which other processes took the CPU (disturbed): "
                "measure again on an idle machine."
            )
        if self.left_out:
            sentences.append(f"Left out after {self.minutes:g} minutes: {', '.join(self.left_out)}.")
        return "".join(f"{sentence}\n" for sentence in sentences)

    def _write(self, status: str) -> None:
        ended = {"time": now(), "load_average": [round(load, 2) for load in os.getloadavg()]}
        result = {**self._head, "status": status, "ended": ended, "left_out": self.left_out, "rows": self.rows}
        write_atomically(self.folder / "result.json", json.dumps(result, indent=1) + "\n")
        partial = "PARTIAL: the benchmark has not ended, or was ended early.\n\n" if status == "partial" else ""
        warnings = f"\n{self._warnings()}" if self._warnings() else ""
        text = f"{partial}{self.title}\n\n{markdown_table(self._columns())}\n{warnings}"
        write_atomically(self.folder / "table.md", text)


def _disturbed(row: Row) -> str | None:
    return f"{row['disturbed']} of {row['samples']}" if row.get("disturbed") else None


def _launches(row: Row) -> str | None:
    return f"{row['with_launches']} of {row['samples']}" if row.get("with_launches") else None


def column(head: str, unit: str, rows: Sequence[Row], cell: Callable[[Row], Any], left: bool = False) -> Column:
    """Numbers with three digits, an estimate as "median low-high"; None is empty."""
    return Column(head, unit, [_text(cell(row)) for row in rows], left)


def scaled(key: str, factor: float) -> Callable[[Row], list[float] | None]:
    """The cell of an estimate in another unit; of None, as where nothing was measured, it is empty."""
    return lambda row: None if row[key] is None else [factor * value for value in row[key]]


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
