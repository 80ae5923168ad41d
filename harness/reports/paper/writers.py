"""Writes a table of a paper as LaTeX, Markdown or CSV: the same numbers and marks in each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from harness.config.catalogue import ConfigError, entries
from harness.reports.columns import NOT_KEPT
from harness.reports.labels import name
from harness.reports.paper.cells import STAR, Cell
from harness.reports.paper.table import EMPTY, PaperTable
from harness.reports.papers import RESULTS
from harness.results import files
from harness.terminal.notices import visible
from harness.terminal.tables import Column, in_markdown, markdown_table

BIB = RESULTS / "paper" / "methods.bib"
# of a name that may hold any character
IN_LATEX = str.maketrans({char: f"\\{char}" for char in "&%$#_{}"})
IN_LATEX |= str.maketrans(
    {
        "\n": " ",
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "±": r"$\pm$",
        NOT_KEPT: r"$\dagger$",
    }
)
MARKS = {NOT_KEPT: r"\dagger", STAR: "*"}


def write(table: PaperTable, path: Path) -> None:
    """Write the table as the suffix of the file says: .tex, .csv or .md."""
    if path.suffix not in (".csv", *TEXTS):
        raise ConfigError(f"--out {path}: name a file in .tex, .csv or .md")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        files.write_csv(path, as_rows(table))
    else:
        files.write_atomically(path, TEXTS[path.suffix](table))


def as_rows(table: PaperTable) -> list[dict[str, Any]]:
    """Return the rows of a CSV file: the frame, with the levels of its heads in one."""
    frame = table.frame()
    heads = [
        " ".join(filter(None, (*line, "" if part == "value" else part)))
        for *line, part in frame.columns
    ]
    return [
        dict(zip((*table.row_names, *heads), (*line, *numbers), strict=True))
        for line, numbers in zip(table.rows, frame.to_numpy(dtype=object), strict=True)
    ]


def as_markdown(table: PaperTable) -> str:
    """Return the table in Markdown, with its caption below it."""
    columns = [
        Column(word, "", [line[level] for line in table.rows], left=True)
        for level, word in enumerate(table.row_names)
    ]
    for number, line in enumerate(table.columns):
        own = [table.cells.get((row, number)) for row in range(len(table.rows))]
        cells = [_in_markdown(cell, table) if cell else EMPTY for cell in own]
        columns.append(Column(" ".join(filter(None, line)), "", cells))
    caption = in_markdown(table.caption).replace(STAR, rf"\{STAR}")
    return f"{markdown_table(columns)}\n\n{caption}\n"


def _in_markdown(cell: Cell, table: PaperTable) -> str:
    number, interval = table.parts(cell)
    strong = f"**{number}**" if cell.best else number
    return " ".join(filter(None, (strong + cell.marks.replace(STAR, rf"\{STAR}"), interval)))


def as_latex(table: PaperTable) -> str:
    """Return a `table` environment for \\input in a paper, with a comment that names the packages it
    needs. pandas gets numbers as cells and prints their texts for them, because it would escape the
    marks in a text as it does in names."""
    import numpy as np
    import pandas as pd

    layout = table.layout
    names, over = len(table.row_names), range(len(table.columns))
    cited = _cited(table) if layout.cite else {}
    known = [[table.cells.get((row, column)) for column in over] for row in range(len(table.rows))]
    texts = [_in_latex(cell, table) if cell else EMPTY for row in known for cell in row]
    places = np.arange(len(texts)).reshape(len(table.rows), len(over))
    index = pd.MultiIndex.from_tuples(table.rows) if names > 1 else [word for (word,) in table.rows]
    style = pd.DataFrame(places, index=index).style.format(texts.__getitem__)
    style = style.format_index(lambda word: _named(word, cited))
    said = layout.caption or in_latex(table.title)
    drawn = style.to_latex(
        column_format="l" * (names - table.headed) + "c" * len(over),
        environment="table*" if layout.wide else "table",
        position="tb",
        position_float="centering",
        hrules=True,
        multirow_align="naive",
        caption=" ".join([said, *map(in_latex, table.legend())]),
        label=layout.label,
    )
    lines = drawn.splitlines()
    top, middle, bottom = (lines.index(rf"\{rule}rule") for rule in ("top", "mid", "bottom"))
    body = [
        line
        for row, text in enumerate(lines[middle + 1 : bottom])
        for line in (*_above(table, row), text.partition(" & ")[2] if table.headed else text)
    ]
    lines = [
        *lines[: top + 1],
        *_header(table, cited),
        *lines[middle : middle + 1],
        *body,
        *lines[bottom:],
    ]
    if layout.fit:
        lines[top - 1] = r"\resizebox{\linewidth}{!}{" + lines[top - 1]
        lines[-2] += "}"
    if layout.size:
        lines.insert(2, rf"\{layout.size}")
    drawn_anew = layout.fit or layout.angle
    packages = ["booktabs", *["natbib"] * layout.cite, *["graphicx"] * bool(drawn_anew)]
    return "\n".join([rf"% \usepackage{{{','.join(packages)}}}", *lines, ""])


def _above(table: PaperTable, row: int) -> Iterator[str]:
    """Yield the lines above a row: a rule, and the name of its model if that is no column."""
    if row in table.breaks:
        yield r"\midrule"
    model, *_ = table.rows[row]
    if table.headed and (row == 0 or table.rows[row - 1][0] != model):
        size = len(table.row_names) - 1 + len(table.columns)
        yield rf"\multicolumn{{{size}}}{{l}}{{\textit{{{in_latex(model)}}}}} \\"


def _header(table: PaperTable, cited: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines above the rows: a heading spans what it is over, with a rule below it, and the
    last line names the columns and, on their left, the levels of a row."""
    names = list(map(in_latex, table.row_names[table.headed :]))
    depth = len(table.columns[0])
    for level in range(depth):
        is_last = level == depth - 1
        cells = list(names) if is_last else [""] * len(names)
        rules = []
        at = len(names)
        for line, some in groupby(table.columns, key=lambda line: line[: level + 1]):
            size = len(list(some))
            word = _named(line[-1], cited)
            if is_last and table.layout.angle:
                word = rf"\rotatebox{{{table.layout.angle}}}{{{word}}}"
            if word and not is_last:
                rules.append(rf"\cmidrule(lr){{{at + 1}-{at + size}}}")
            cells.append(rf"\multicolumn{{{size}}}{{c}}{{{word}}}" if size > 1 else word)
            at += size
        yield " & ".join(cells) + r" \\"
        if rules:
            yield " ".join(rules)


def _named(word: str, cited: Mapping[str, str]) -> str:
    """Return the cell of a name. A bracket or a star at its beginning is protected: the end of the
    row or the rule before it would take a bracket for its argument, and drop a star."""
    shield = "{}" if word.lstrip().startswith(("[", STAR)) else ""
    return shield + in_latex(word) + cited.get(word, "")


def in_latex(text: str) -> str:
    """Return a text in which no character is a command of LaTeX."""
    return visible(text).translate(IN_LATEX)


def _in_latex(cell: Cell, table: PaperTable) -> str:
    number, interval = table.parts(cell)
    strong = rf"\textbf{{{number}}}" if cell.best else number
    above = "".join(map(MARKS.__getitem__, cell.marks))
    raised = f"^{{{above}}}" if above else ""
    if interval.startswith("±"):
        return rf"{strong}${raised}_{{\pm {interval[1:]}}}$"
    ends = rf" {{\scriptsize {interval}}}" if interval else ""
    return strong + (f"${raised}$" if raised else "") + ends


def _cited(table: PaperTable) -> dict[str, str]:
    """Return the citation of each method whose paper is in methods.bib, by its printed name: a key
    is the method's name, that of its base, or of a press."""
    if not BIB.is_file():
        raise ConfigError(f"cite: {BIB} is not there: it comes with the repository, not the wheel")
    keys = set(re.findall(r"^@\w+{([^,]+),", BIB.read_text(encoding="utf-8"), re.MULTILINE))
    known = entries("method")
    cited = {}
    for one in table.chosen:
        entry = known.get(name(one.row.run, "method"))
        while entry is not None:
            words = (entry.name, entry.name.removeprefix("press_").replace("_", ""))
            if found := [word for word in words if word in keys]:
                cited[one.method] = rf"~\citep{{{found[0]}}}"
                break
            entry = entry.base
    return cited


TEXTS = {".tex": as_latex, ".md": as_markdown}  # by suffix
