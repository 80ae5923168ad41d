"""Writes a report as one HTML file that needs no server and no network. Its tables are those of
document.py."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

from harness.reports import columns
from harness.reports.compare import Comparison, ReportRow
from harness.reports.conditions import conditions, origin
from harness.reports.document import ReportTable, report_tables
from harness.reports.overview import ALARM, all_lines
from harness.reports.pictures.figures import Drawn, png
from harness.reports.pictures.kinds import of_page
from harness.reports.rerun import command
from harness.results import files
from harness.results.facts import FACTS
from harness.results.provenance import now
from harness.terminal.tables import Column
from methods.tiers.tier import TIERS

MEANINGS = {tier.head: tier.meaning for tier in TIERS.values()}
MEANINGS |= {fact.head: fact.shown for fact in FACTS.values() if fact.head and fact.shown}


def write_page(folder: Path, tables: Sequence[Comparison], left_out: Sequence[str] = ()) -> Path:
    """Write the page to `folder`/index.html and return that path. `left_out`: sentences on runs
    that are in no table."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    files.write_atomically(path, page(tables, left_out))
    return path


def page(tables: Sequence[Comparison], left_out: Sequence[str]) -> str:
    """Return the HTML of the whole page; all text from runs is escaped."""
    tasks = (
        ", ".join(dict.fromkeys(table.title.partition(",")[0] for table in tables)) or "no results"
    )
    contents = linked(table.title for table in tables) if len(tables) > 1 else ""
    before = [contents, listed(left_out, "soft")]
    title = escape(f"KV-cache methods: {tasks}")
    return document(title, before, map(_section, tables), "--html")


def linked(titles: Iterable[str]) -> str:
    """Return a list of links to the sections that have these titles."""
    links = (f'<li><a href="#table-{i}">{escape(title)}</a></li>' for i, title in enumerate(titles))
    return f"<ol>{''.join(links)}</ol>"


def document(
    title: str, before: Sequence[str], sections: Iterable[Iterable[str]], option: str
) -> str:
    """Return a whole document. `title`, `before` and the lines of each section are HTML; `option` is that of the
    report."""
    body = [f"<h1>{title}</h1>", *before]
    for i, section in enumerate(sections):
        body += [f'<section id="table-{i}">', *section, "</section>"]
    template = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.substitute(title=title, body="\n".join(body), option=option, made=now())


def _section(table: Comparison) -> Iterator[str]:
    """Yield the HTML of one comparison: its first table, the lines below it and one figure; all
    else is folded."""
    yield f"<h2>{escape(table.title)}</h2>"
    yield table_html(ReportTable("Scores, times and bytes", columns.overview(table)))
    yield listed(all_lines(table))
    drawn = [_image(kind, one) for kind, one in of_page(table)]
    yield from drawn[:1]
    yield "<details><summary>All tables, conditions, notes and figures</summary>"
    yield listed(list(conditions(table)), "notes")
    yield from map(table_html, report_tables(table))
    yield from drawn[1:]
    yield "</details>\n<details><summary>The command and the origin of each row</summary>"
    yield from map(_origin, table.entries)
    yield "</details>"


def listed(lines: Sequence[str], kind: str = "") -> str:
    """Return the lines as an HTML list of the class `kind`; alarms stand out."""
    items = [
        f"<li{' class=alarm' * line.startswith(ALARM)}>{escape(line)}</li>"
        for line in lines
        if line
    ]
    return f'<ul class="{kind}">{"".join(items)}</ul>' if items else ""


def table_html(
    table: ReportTable, attributes: Sequence[str] = (), commands: Sequence[str] = ()
) -> str:
    """Return a table in a box that scrolls by itself. `attributes`: HTML attributes of each row, for the filters;
    `commands`: the HTML of each row's last cell."""
    shown = [column for column in table.columns if not column.empty]
    heads = "".join(map(_head, shown)) + "<th class=left scope=col>command</th>" * bool(commands)
    columns = [_cells(column, row_head=not place) for place, column in enumerate(shown)]
    none = [""] * len(shown[0].cells)
    rows = zip(zip(*columns, strict=True), attributes or none, commands or none, strict=True)
    body = "\n".join(
        f"<tr{kept}>{''.join(cells)}{f'<td class=left>{last}</td>' * bool(last)}</tr>"
        for cells, kept, last in rows
    )
    name = escape(table.caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table><caption>{name}</caption>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>{body}</tbody></table></div>\n{listed(table.notes, 'notes')}"
    )


def _head(column: Column) -> str:
    tip = escape(MEANINGS.get(column.head) or "")
    return f'<th{_left(column)} scope=col title="{tip}">{escape(column.head)}<span>{escape(column.unit)}</span></th>'


def _cells(column: Column, row_head: bool) -> Iterator[str]:
    """Yield the HTML cells of a column, with the number that its head sorts them by: none for an unknown one.
    `row_head`: True if they name their rows; they may break behind an underscore."""
    tag = "th scope=row" if row_head else "td"
    values = column.values or [None] * len(column.cells)
    for cell, value in zip(column.cells, values, strict=True):
        sorted_by = f' data-value="{"" if value is None else value}"' if column.values else ""
        text = escape(cell).replace("_", "_<wbr>") if row_head else escape(cell)
        yield f"<{tag}{_left(column)}{sorted_by}>{text}</{tag[:2]}>"


def _left(column: Column) -> str:
    return " class=left" if column.left else ""


def _image(kind: str, drawn: Drawn) -> str:
    """Return a figure that a narrow screen shows in its own size, in a box that scrolls by itself."""
    width = round(96 * drawn.figure.get_size_inches()[0])
    data = b64encode(png(drawn.figure)).decode()
    image = f'<img alt="{escape(kind)}" width="{width}" src="data:image/png;base64,{data}">'
    return (
        f'<figure><div class="scroll" tabindex="0" role="region" aria-label="{escape(kind)}">{image}</div>'
        f"<figcaption class=soft>{escape(drawn.caption)}</figcaption></figure>"
    )


def _origin(entry: ReportRow) -> str:
    run = entry.run
    facts = {
        "folder": run.folder.name,
        "status": run.info.get("error") or run.status,
        **origin(run),
    }
    facts |= {key: run.info.get(key) for key in ("started", "ended", "identity_sha256")}
    known = "; ".join(
        f"{key.replace('_', ' ')}: {value}"
        for key, value in facts.items()
        if value not in (None, "")
    )
    return f"<h4>{escape(entry.title)}</h4><code>{escape(command(run))}</code><p class=soft>{escape(known)}</p>"
