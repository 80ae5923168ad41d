"""Tables of text: aligned for a terminal, or Markdown. Cells are strings; a column says its unit in its header."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


@dataclass(frozen=True, slots=True)
class Column:
    """`head` and `unit` stand above each other in a terminal."""

    head: str
    unit: str
    cells: list[str]
    left: bool = False

    @property
    def empty(self) -> bool:
        return not any(self.cells)

    @property
    def width(self) -> int:
        return max(len(text) for text in (self.head, self.unit, *self.cells))

    def aligned(self, text: str) -> str:
        return text.ljust(self.width) if self.left else text.rjust(self.width)


def text_table(columns: Sequence[Column], width: int = 160) -> str:
    """Columns without any value are left out; where the line is too long the first column gives way."""
    kept = [column for column in columns if not column.empty]
    excess = sum(column.width + 2 for column in kept) - 2 - width
    if kept and excess > 0:
        kept[0] = _shortened(kept[0], max(8, kept[0].width - excess))
    rows = list(zip(*([column.head, column.unit, "", *column.cells] for column in kept), strict=True))
    lines = ["  ".join(column.aligned(cell) for column, cell in zip(kept, row, strict=True)).rstrip() for row in rows]
    lines[2:3] = ["  ".join("-" * column.width for column in kept)]
    return "\n".join(line for line in lines if line)


def markdown_table(columns: Sequence[Column]) -> str:
    kept = [column for column in columns if not column.empty]
    heads = [f"{column.head} ({column.unit})" if column.unit else column.head for column in kept]
    rows = [heads, [":--" if column.left else "--:" for column in kept]]
    rows += [list(row) for row in zip(*(column.cells for column in kept), strict=True)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def scaled(values: Sequence[float | None], units: Sequence[tuple[float, str]]) -> tuple[list[str], str]:
    """Three significant digits in one unit for all, the largest in which the largest value is at least one."""
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    factor, unit = next((pair for pair in units if largest >= pair[0]), units[-1])
    return ["" if value is None else digits(value / factor) for value in values], unit


def digits(value: float) -> str:
    """Three significant digits, without an exponent: 0.012, 1.23, 45.6, 789, 12345."""
    size = abs(value)
    if size >= 100 or size == 0:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def percent(value: float | None, places: int = 1, sign: bool = False) -> str:
    """0.125 -> 12.5; a rounded zero carries no minus."""
    if value is None:
        return ""
    text = f"{100 * value:+.{places}f}" if sign else f"{100 * value:.{places}f}"
    return text.lstrip("+-") if float(text) == 0 else text


def probability(p: float | None) -> str:
    return "" if p is None else "<.001" if p < 0.001 else f"{p:.3f}"


def _shortened(column: Column, width: int) -> Column:
    cells = [cell if len(cell) <= width else cell[: width - 1] + "…" for cell in column.cells]
    return Column(column.head, column.unit, cells, column.left)
