"""Rows of text for a terminal and for Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def aligned(rows: Iterable[tuple[str, str]], most: int = 60) -> list[str]:
    """Two columns, indented by two; a left cell wider than `most` pushes its own right cell alone."""
    rows = list(rows)
    width = min(most, max((len(left) for left, _ in rows), default=0))
    return [f"  {left:<{width}}  {right}".rstrip() for left, right in rows]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(map(_row, [head, ["---"] * len(head), *rows]))


def code(text: str) -> str:
    """Markdown for `text` as it is, backticks and all."""
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""


def _row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
