"""How the line of each method is drawn: the same in all panels of a figure, and Full apart from the others."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D

from harness.reports.compare import Comparison, ReportRow
from harness.reports.pictures.figures import COLOURS, INK
from harness.results.compared import FULL

MARKS = "osD^vPXp<>h"  # 11: with 12 colours no pair comes back before 132 lines
NAME_WIDTH = 30  # characters of a line in the legend
DASHED = (0, (4, 3))
FULL_STYLE: dict[str, Any] = {
    "color": INK,
    "marker": "*",
    "markersize": 8,
    "linewidth": 0.8,
    "linestyle": DASHED,
}
Styles = Mapping[str, dict[str, Any]]  # by name, Full's first


def is_full(entry: ReportRow) -> bool:
    return bool(entry.summary["method"] == FULL)


def named(entry: ReportRow) -> str:
    """Return the name of a row; "(incomplete)" marks a run that is not finished."""
    return entry.title + " (incomplete)" * (entry.summary["status"] != "complete")


def styles(tables: Sequence[Comparison], name: Callable[[ReportRow], str]) -> Styles:
    """Return how the lines of all rows are drawn, by the `name` that a row's line has."""
    rows = [entry for table in tables for entry in table.entries]
    fulls = dict.fromkeys(name(entry) for entry in rows if is_full(entry))
    others = dict.fromkeys(name(entry) for entry in rows if not is_full(entry))
    return dict.fromkeys(fulls, FULL_STYLE) | {
        name: _style(number) for number, name in enumerate(others)
    }


def _style(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKS[number % len(MARKS)],
        "linestyle": "-" if number < len(COLOURS) else (0, (3, 1.5)),
        "markeredgecolor": "white",
    }


def broken(name: str) -> str:
    """Return a long name in several lines, broken at spaces."""
    return textwrap.fill(name, NAME_WIDTH, break_long_words=False)


def handles(styles: Styles) -> list[Line2D]:
    """Return the lines of a legend."""
    return [Line2D([], [], label=broken(name), **style) for name, style in styles.items()]
