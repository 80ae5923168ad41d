"""Tables for a paper: booktabs, every character escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.terminal.tables import Column

SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "µ": r"\textmu{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''", "…": r"\dots{}",
    **{char: f"\\{char}" for char in "&%$#_{}"},
}  # fmt: skip


def latex_table(columns: Sequence[Column], caption: str, label: str, below: Sequence[str] = ()) -> list[str]:
    """Lines of a float no wider than the text; columns without any value are left out, and without any all of it.
    `below`: paragraphs of small print under the table."""
    kept = [column for column in columns if not column.empty]
    if not kept:
        return []
    heads = [escaped(column.head.replace("\n", " ")) for column in kept]
    units = [escaped(column.unit) for column in kept]
    rows = zip(*(column.cells for column in kept), strict=True)
    return [
        "",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escaped(caption)}}}",
        rf"\label{{{label}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{''.join('l' if column.left else 'r' for column in kept)}}}",
        r"\toprule",
        _row(heads),
        *([_row(units)] if any(units) else []),
        r"\midrule",
        *(_row([cell(text) for text in row]) for row in rows),
        r"\bottomrule",
        r"\end{tabular}}",
        *(_paragraph(text) for text in below if text),
        r"\end{table}",
    ]


def _paragraph(text: str) -> str:
    return rf"\par\smallskip\parbox{{\linewidth}}{{\footnotesize\raggedright {escaped(text)}}}"


def cell(text: str) -> str:
    """A real minus, a small interval, raised stars."""
    shown = escaped(text)
    shown = re.sub(r"(?<![\w.])-(?=\d)", "$-$", shown)
    shown = re.sub(r"(\[[^\]]+, [^\]]+\])", r"{\\scriptsize \1}", shown)
    return re.sub(r"\*+$", lambda stars: f"$^{{{stars[0]}}}$", shown)


def escaped(text: str) -> str:
    return "".join(SPECIAL.get(char, char) for char in text)


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
