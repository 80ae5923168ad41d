"""Formats tables: aligned for a terminal, or as Markdown.

Cells are strings; a column names its unit in its header.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from textwrap import TextWrapper
from typing import TypeVar

from harness.terminal.notices import visible

WIDTH = 160  # characters of a table in a terminal
LEFT = 60  # characters of the left of two aligned columns

Known = TypeVar("Known")  # of a value that is known
Scale = Sequence[tuple[float, str]]
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `head` (may have several lines) and `unit` stand above the cells.
    `values`: the numbers that the cells show, for sorting."""

    head: str
    unit: str
    cells: list[str]
    left: bool = False
    values: Sequence[float | None] = ()

    @property
    def empty(self) -> bool:
        return not any(self.cells)

    @property
    def width(self) -> int:
        return max(
            len(line) for text in (self.head, self.unit, *self.cells) for line in text.split("\n")
        )


def text_table(columns: Sequence[Column], width: int = WIDTH) -> str:
    """Return a table for a terminal. Columns without any value are left out; if a line is too long,
    the first column wraps. Nothing is cut."""
    kept = [
        replace(column, head=visible(column.head), cells=list(map(visible, column.cells)))
        for column in columns
        if not column.empty
    ]
    excess = sum(column.width + 2 for column in kept) - 2 - width
    if kept and excess > 0:
        width = max(8, kept[0].width - excess)
        # at spaces
        wrap = TextWrapper(
            width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        kept[0] = replace(kept[0], cells=list(map(wrap.fill, kept[0].cells)))
    tall = max((column.head.count("\n") for column in kept), default=0)
    heads = ["\n" * (tall - column.head.count("\n")) + column.head for column in kept]
    widths = [column.width for column in kept]
    forms = [
        f"{'<' if column.left else '>'}{width}" for column, width in zip(kept, widths, strict=True)
    ]
    lines = [*_lines(forms, heads), *_lines(forms, [column.unit for column in kept])]
    lines.append("  ".join("-" * width for width in widths))
    for row in zip(*(column.cells for column in kept), strict=True):
        lines += _lines(forms, row)
    return "\n".join(line for line in lines if line)


def _lines(forms: Sequence[str], row: Sequence[str]) -> list[str]:
    """Return the lines of text of one row of a table; a cell may have several lines. `forms`: how
    `format` aligns the cells of each column."""
    parts = zip_longest(*(cell.split("\n") for cell in row), fillvalue="")
    return ["  ".join(map(format, part, forms)).rstrip() for part in parts]


def markdown_table(columns: Sequence[Column]) -> str:
    kept = [column for column in columns if not column.empty]
    heads = [f"{column.head} ({column.unit})" if column.unit else column.head for column in kept]
    sides = [":--" if column.left else "--:" for column in kept]
    rows = zip(*(column.cells for column in kept), strict=True)
    lines = [" | ".join(map(in_markdown, line)) for line in (heads, sides, *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def in_markdown(text: str) -> str:
    """Return a text, as a name that a run recorded, as one line of Markdown in which it begins no
    cell and no HTML tag."""
    line = visible(" ".join(text.split())).replace("|", "\\|")
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", line)


def unit_of(values: Sequence[float | None], units: Scale) -> tuple[float, str]:
    """Return the unit that suits all values, with its size: the largest of `units` in which the
    largest value is at least 1."""
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    return next((pair for pair in units if largest >= pair[0]), units[-1])


def scaled(values: Sequence[float | None], units: Scale) -> tuple[list[str], str]:
    """Return values as text with three significant digits, and the unit that all share (`unit_of`).
    None becomes an empty text."""
    factor, unit = unit_of(values, units)
    return written(values, lambda value: digits(value / factor)), unit


def written(values: Sequence[Known | None], write: Callable[[Known], str]) -> list[str]:
    """Return values as text; None becomes an empty text."""
    return ["" if value is None else write(value) for value in values]


def with_unit(value: float, units: Scale) -> str:
    """Return one value as text in the largest of `units` that it fills, such as "1.50 GiB"."""
    (number,), unit = scaled([value], units)
    return f"{number} {unit}"


def quantity(
    head: str,
    values: Sequence[float | None],
    units: Scale,
    per: str = "",
    hide_zeros: bool = False,
) -> Column:
    """Return a column of values in the unit that fits the largest, followed by `per` ("/step").
    `hide_zeros`: if all values are zero, leave the cells empty, which drops the column from the
    table."""
    cells, unit = scaled(values, units)
    if hide_zeros and not any(values):
        cells = [""] * len(values)
    return Column(head, unit + per, cells, values=values)


def quantities(columns: Mapping[str, Sequence[float | None]], units: Scale) -> list[Column]:
    """Return one column per entry of `columns`, which maps heads to values; all are in the same
    unit."""
    cells, unit = scaled(list(chain.from_iterable(columns.values())), units)
    rest = iter(cells)
    made = []
    for head, values in columns.items():
        own = list(islice(rest, len(values)))
        made.append(Column(head, unit, own, values=values))
    return made


def share(head: str, values: Sequence[float | None]) -> Column:
    """Return a column of shares (0-1) in percent."""
    return Column(head, "%", [percent(value) for value in values], values=values)


def number(head: str, unit: str, values: Sequence[float | None]) -> Column:
    return Column(head, unit, written(values, digits), values=values)


def counts(head: str, values: Sequence[int | None]) -> Column:
    return Column(head, "", written(values, str), values=values)


def digits(value: float) -> str:
    """Return three significant digits, without an exponent: 0.012, 1.23, 45.6, 789, 12345."""
    size = abs(value)
    if size >= 100 or size == 0:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def percent(value: float | None, places: int = 1, sign: bool = False) -> str:
    """Return a share in percent (0.125 -> 12.5); a rounded zero has no minus sign."""
    if value is None:
        return ""
    text = f"{100 * value:+.{places}f}" if sign else f"{100 * value:.{places}f}"
    return text.lstrip("+-") if float(text) == 0 else text


def with_ci(value: float | None, ci: Sequence[float] | None, sign: bool = False) -> str:
    """Return a share in percent as text, followed by its confidence interval: "40.0 [23, 59]"."""
    if value is None:
        return ""
    text = percent(value, 1, sign)
    return f"{text} {_interval(ci, sign)}".strip() if ci else text


def _interval(ci: Sequence[float], sign: bool) -> str:
    """Return a confidence interval in percent, without decimals. For a difference (`sign`), as many
    decimals are shown as it takes to tell an end from 0."""
    places = next(
        (n for n in range(3) if not sign or all(round(100 * end, n) for end in ci if end)), 3
    )
    return f"[{percent(ci[0], places, sign)}, {percent(ci[1], places, sign)}]"


def probability(p: float | None) -> str:
    """Return p with three decimals, or with four if three would read as 0.050, so that the side of
    0.05 is seen."""
    if p is None:
        return ""
    return "<.001" if p < 0.001 else f"{p:.4f}" if f"{p:.3f}" == "0.050" else f"{p:.3f}"


def aligned(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return rows of two texts as lines with two aligned columns. A left text wider than LEFT
    shifts only its own right text."""
    rows = list(rows)
    width = min(LEFT, max((len(left) for left, _ in rows), default=0))
    return [f"  {left:<{width}}  {right}".rstrip() for left, right in rows]
