"""The output of a benchmark: rows on the screen and in files as they come, all figures as JSON, and
one picture."""

from __future__ import annotations

import faulthandler
import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from textwrap import fill
from time import perf_counter
from typing import Any, NamedTuple

from harness.bench.common.measure import Estimate
from harness.results.files import write_atomically
from harness.results.provenance import code_hash, load_average, now, provenance, source_hash
from harness.terminal.notices import say
from harness.terminal.tables import Column, digits, markdown_table, text_table
from kernels import ops
from kernels.temporary import remove_abandoned

ROOT = Path("results/runs/bench")
BenchRow = Mapping[str, Any]
Table = Callable[[Sequence[BenchRow]], list[Column]]  # of rows without an error
Picture = Callable[..., None]  # of a path and such rows, and a title


class Report:
    """Writes a benchmark's folder. Every row is printed and written as soon as it is measured, so
    that a benchmark that is killed leaves its rows, marked as partial.

    With `row_s` in `options`, the process ends if a row takes longer than so many seconds, as when
    a kernel hangs; and the rows that an earlier process has written to the folder, or has begun,
    are taken over and not measured again (harness/bench/suite.py)."""

    def __init__(
        self, kind: str, title: str, options: Namespace, table: Table, **facts: Any
    ) -> None:
        self.title, self.table = title, table
        self.row_s: float | None = getattr(options, "row_s", None)
        self.minutes = getattr(options, "minutes", None)
        self.no_plot = getattr(options, "no_plot", False)
        self.folder: Path = options.out or ROOT / f"{kind}-{datetime.now(UTC):%Y%m%dT%H%M%S}"
        self.rows: list[BenchRow] = []
        self.left_out: list[str] = []
        self._tried: list[str] = []  # rows that were begun, noted with `row_s`
        self._under_way: str | None = None  # the last of them, until its figures are there
        # `out` says where things lie on this machine, and so is not written
        asked = {name: value for name, value in vars(options).items() if name != "out"}
        stamp = provenance(str(asked.get("device", "cpu")))
        self._head = {
            "schema": 1,
            "kind": kind,
            "title": title,
            "options": asked,
            **facts,
            "provenance": stamp,
        }
        self._began = perf_counter()
        for folder in (self.folder, *ROOT.glob(f"{kind}-*")):
            remove_abandoned(folder)  # stores of gigabytes, where an earlier one was killed
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.row_s is not None and (earlier := result_in(self.folder)):
            self.rows, self._tried = earlier["rows"], earlier["tried"]
            if lost := earlier["under_way"]:
                self.rows.append(failed_row(lost, "the process ended while it was measured"))
        say(f"{title}\nEach row goes to {self.folder} as it comes.")

    def add(self, row: BenchRow, line: str) -> None:
        """Add a row, write the files and print `line`, the row as text."""
        self.rows.append(row)
        self._under_way = None
        self._write("partial")
        mark = _marked("disturbed")(row)
        say(line + (f" ({mark} samples disturbed)" if mark else ""))

    def skips(self, what: str) -> bool:
        """Return True if the row `what` is not to be measured: an earlier process has begun it, or
        --minutes are over; then it is listed as left out."""
        if what in self._tried:
            return True
        over = self.minutes is not None and perf_counter() - self._began > 60 * self.minutes
        if over:
            self.left_out.append(what)
        elif self.row_s is not None:
            self._tried.append(what)
            self._under_way = what
            self._write("partial")
            faulthandler.dump_traceback_later(self.row_s, exit=True)
        return over

    def finish(self, picture: Picture | None = None) -> list[BenchRow]:
        """Print the table, draw the picture unless --no-plot or matplotlib is missing, and return
        the rows without an error. Raise `ValueError` if there are none."""
        faulthandler.cancel_dump_traceback_later()
        good = self._good()
        self._write("complete")
        if not good:
            raise ValueError(
                f"Nothing could be measured: {self.rows[0]['error']}"
                if self.rows
                else self._warnings()
            )
        end = f"load average {load_average()[0]:.2f}; written to {self.folder}"
        say(f"\n{self.title}\n\n{text_table(self._columns())}\n\n{self._warnings()}{end}")
        if picture and not self.no_plot:
            with suppress(ImportError):
                picture(self.folder / "plot.png", good, title=fill(self.title, 90))
        return good

    def _good(self) -> list[BenchRow]:
        return [row for row in self.rows if "error" not in row]

    def _columns(self) -> list[Column]:
        good = self._good()
        marked = [
            Cell("disturbed", _marked("disturbed")),
            Cell("launches", _marked("with_launches")),
        ]
        return [*self.table(good), *table(*marked)(good)]

    def _warnings(self) -> str:
        """Return sentences that a reader of the table must know, one per line."""
        disturbed = sum(bool(row.get("disturbed")) for row in self._good())
        sentences = []
        if disturbed:
            sentences.append(
                f"{disturbed} of {len(self.rows)} rows hold samples in which other processes took the CPU (disturbed): "
                "measure again on an idle machine."
            )
        sentences += [
            f"Not measured: {row['label']}: {row['error']}" for row in self.rows if "error" in row
        ]
        if self._under_way:
            sentences.append(f"Under way: {self._under_way}.")
        if self.left_out:
            sentences.append(
                f"Left out after {self.minutes:g} minutes: {', '.join(self.left_out)}."
            )
        return "".join(f"{sentence}\n" for sentence in sentences)

    def _write(self, status: str) -> None:
        ended = {"time": now(), "load_average": load_average()}
        result = {
            **self._head,
            "status": status,
            "ended": ended,
            "left_out": self.left_out,
            "tried": self._tried,
            "under_way": self._under_way,
            "rows": self.rows,
        }
        write_atomically(self.folder / "result.json", json.dumps(result, indent=1) + "\n")
        partial = (
            "PARTIAL: the benchmark has not ended, or was ended early.\n\n"
            if status == "partial"
            else ""
        )
        warnings = f"\n{self._warnings()}" if self._warnings() else ""
        text = f"{partial}{self.title}\n\n{markdown_table(self._columns())}\n{warnings}"
        write_atomically(self.folder / "table.md", text)


def result_in(folder: Path) -> dict[str, Any] | None:
    """Return the figures that a benchmark of today's code has written to its folder so far; None if
    there are none."""
    path = folder / "result.json"
    made = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return made if made and made["provenance"]["sources"] == _sources() else None


@cache
def _sources() -> str:
    return source_hash()


class Cell(NamedTuple):
    """A column of a table. `of`: the key of a row ("time.low" for a nested one), or a function of
    the row; `factor` scales numbers to `unit`."""

    head: str
    of: str | Callable[[BenchRow], Any]
    unit: str = ""
    factor: float = 1
    left: bool = False

    def value(self, row: BenchRow) -> Any:
        """Return the value of this column in a row, scaled; three numbers for an estimate, None if
        the row lacks it."""
        value: Any = self.of(row) if callable(self.of) else row
        for key in [] if callable(self.of) else self.of.split("."):
            value = value.get(key)
        if isinstance(value, tuple | list):
            return [self.factor * number for number in value]
        return self.factor * value if isinstance(value, int | float) and self.factor != 1 else value


def table(*cells: Cell) -> Table:
    return lambda rows: [
        Column(cell.head, cell.unit, [_text(cell.value(row)) for row in rows], cell.left)
        for cell in cells
    ]


def some(key: str) -> Callable[[BenchRow], Any]:
    """Return a function that takes the number `key` of a row and turns 0 into None, an empty
    cell."""
    return lambda row: row[key] or None


def timed_code(*modules: str) -> dict[str, str | None]:
    """Return hashes of the code that a row has timed, by module: that of `modules`, and of the
    operations that have run since `ops.forget_used`. `make tables` marks rows whose code changes."""
    ran = (op.targets[name] for op in ops.ALL for name in op.used)
    return {module: code_hash(module) for module in sorted({*ran, *modules})}


def failed_row(label: str, reason: str, **facts: Any) -> dict[str, Any]:
    """Return a row that says why something could not be measured. `label` names it below the
    table."""
    return {**facts, "label": label, "error": reason}


def _marked(kind: str) -> Callable[[BenchRow], str | None]:
    """Return a function that says how many of a row's samples have the mark `kind`, as in "2 of
    30", and None if none has. The marks are "disturbed" (other processes took our CPU) and
    "with_launches" (the time includes kernel launches)."""
    return lambda row: f"{row[kind]} of {row['samples']}" if row.get(kind) else None


def lines(
    path: Path,
    rows: Sequence[BenchRow],
    *,
    x: str,
    y: str,
    series: str,
    labels: tuple[str, str],
    title: str,
) -> None:
    """Draw rows as one line per `series`, with both axes logarithmic and intervals as bands. `x`,
    `y`: keys of a row; `labels`: of the two axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Any = figure.subplots()
    names = list(dict.fromkeys(row[series] for row in rows))
    for place, name in enumerate(names):
        points = sorted((row[x], *row[y]) for row in rows if row[series] == name and row[y])
        at, middle, low, high = zip(*points, strict=True) if points else ((), (), (), ())
        axes.plot(at, middle, "osD^vPX"[place % 7] + "-", label=name, linewidth=1.2, markersize=4)
        axes.fill_between(at, low, high, alpha=0.15)
    axes.set(xscale="log", yscale="log", xlabel=labels[0], ylabel=labels[1], title=title)
    axes.xaxis.set_major_formatter(
        lambda value, _: f"{value / 1024:g}K" if value >= 1024 else f"{value:g}"
    )
    axes.set_xticks(sorted({row[x] for row in rows}), minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set(major_formatter=_plain, minor_formatter=_plain)
    axes.tick_params(axis="y", which="minor", labelsize=7)
    axes.grid(True, which="major", color="#e3e3e3")
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=120)


def _plain(value: float, _: float) -> str:
    return f"{value:g}"


def _text(value: Any) -> str:
    """Return a value as text: numbers with three digits, counts as they are, estimates as "median
    low-high"."""
    if value is None:
        return ""
    if isinstance(value, (tuple, list)):
        middle, low, high = Estimate(*value)
        return f"{digits(middle)} {digits(low)}-{digits(high)}"
    return str(value) if isinstance(value, str | int) else digits(value)
