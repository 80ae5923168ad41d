"""`python -m harness.report DIR...`: one row per run, one table per task, model and protocol; as a
page too.

The table is printed here, also at the end of `python -m harness` (`print_report`). Its rows are
made by harness/reports/compare.py and its text by harness/reports/document.py.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.config.errors import as_command
from harness.config.plugins import suggestion
from harness.reports.against import against
from harness.reports.choice import Choice, checked, choose
from harness.reports.compare import Comparison, comparisons
from harness.reports.document import (
    as_markdown,
    as_rows,
    as_text,
    overview_text,
    shows_colour,
)
from harness.reports.papers import PUBLISHED
from harness.results import files
from harness.results.records import StoreError
from harness.results.run_folder import find, load_all
from harness.terminal.arguments import Parser, config_dir
from harness.terminal.notices import say, show, visible, warn

# options that show runs
ALONE = ("details", "csv", "md", "paper", "figure", "html", "against")


@as_command()
def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.leaderboard:
        from harness.reports.leaderboard import leaderboard  # matplotlib, as below

        options.leaderboard.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(options.leaderboard, leaderboard(options.folders or [PUBLISHED]))
        say(f"wrote {options.leaderboard}")
        return 0
    runs, unreadable = load_all(find(options.folders), options.config_dir)
    if not runs:
        raise StoreError("; ".join(unreadable))
    tables = comparisons([run for run in runs if not run.is_empty])
    empty = [
        f"{run.folder.name} ({run.info.get('error') or run.status})" for run in runs if run.is_empty
    ]
    left_out = (
        [f"without a single example, and so in no table: {', '.join(empty)}"] if empty else []
    )
    compared = against(tables, options.against) if options.against else []
    if options.figure:
        text = _figure(tables, options)
    elif options.paper:
        text = _paper(tables, options)
    elif options.details:
        text = as_text(tables, compared)
    else:
        text = overview_text(tables, _more(options.folders), colour=shows_colour(sys.stdout))
        text += f"\n\n{as_text((), compared)}" if compared else ""
    show("\n".join(filter(None, [text, *map(visible, left_out)])))
    left_out += [f"left out: {message}" for message in unreadable]
    for path in _written(tables, compared, options, left_out):
        say(f"wrote {path}")
    for message in unreadable:
        warn(f"left out: {message}")
    return 2 if unreadable else 0


def _options(arguments: Sequence[str] | None) -> Namespace:
    """Return what was typed, or end with an error if it cannot be done."""
    parser = Parser("report", __doc__)
    parser.path("folders", "DIR", "folder of a run, or any above it", nargs="*")
    parser.flag("--details", "every table, with conditions, cautions and notes")
    parser.path("--csv", "FILE", "all of every summary, raw numbers")
    parser.path("--md", "FILE", "the same tables in Markdown")
    parser.path(
        "--paper",
        "FILE.yaml",
        "the table of a paper, as FILE.yaml or a layout (snapkv, pqcache, shadowkv) says",
        nargs="?",
        const=True,  # without a file: what suits the runs
    )
    parser.add_argument(
        "--figure",
        metavar="KIND",
        help="a figure of a paper, of the rows of --paper: budget, frontier, differences, needles, length, along",
    )
    parser.path(
        "--out",
        "FILE",
        "where --paper writes it: FILE.tex, FILE.csv or FILE.md; --figure: FILE.pdf, .svg or .png",
    )
    parser.path("--html", "FOLDER", "one page to look through: FOLDER/index.html")
    parser.path("--leaderboard", "FILE", "a page of all rows published here, or of CSVs in DIR")
    parser.add_argument(
        "--against",
        metavar="METHOD",
        help="hold all rows against this one too, paired: snapkv, 'snapkv 20%%'",
    )
    parser.config_dirs("yaml files whose code may run", type=config_dir)
    options = parser.parse_args(arguments)
    if options.html and (options.html.suffix == ".html" or options.html.is_file()):
        parser.error(
            f"--html {options.html}: takes a folder, and writes index.html there: name one without .html"
        )
    apart = options.details or (options.against and not (options.md or options.csv))
    if (options.paper or options.figure) and apart:
        parser.error(
            "--paper and --figure print no table: use --details and --against in a command of their own"
        )
    if others := [f"--{name}" for name in ALONE if options.leaderboard and getattr(options, name)]:
        parser.error(
            f"--leaderboard shows CSV files and no runs: use {others[0]} in a command of its own"
        )
    if not options.folders and not options.leaderboard:
        parser.error("name a DIR: the folder of a run, or any above it, in front of the options")
    if options.figure:
        _check_figure(parser, options)
    elif (options.paper is None) != (options.out is None):
        parser.error("--paper and --out FILE go together: FILE.tex, FILE.csv or FILE.md")
    return options


def _paper(tables: Sequence[Comparison], options: Namespace) -> str:
    """Write the table of a paper, and return what its author must know and its readers do not
    see."""
    from harness.reports.paper.table import paper_table
    from harness.reports.paper.writers import write

    table = paper_table(tables, _choice(options), options.config_dir)
    write(table, options.out)
    return "\n".join(map(visible, table.notes()))


def _figure(tables: Sequence[Comparison], options: Namespace) -> str:
    """Write the figure of a paper, and return what its caption must say."""
    from harness.reports.pictures import figures, kinds  # matplotlib, as above

    choice = _choice(options)
    look = checked(figures.Look, choice.figure, f"{options.paper}: figure")
    chosen = choose(tables, choice, options.config_dir)
    figure, caption = kinds.of_paper(options.figure, chosen, look, choice.names)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figures.save(figure, options.out)
    return visible(caption)


def _choice(options: Namespace) -> Choice:
    return Choice() if options.paper in (None, True) else Choice.read(options.paper)


def _check_figure(parser: Parser, options: Namespace) -> None:
    """End with an error if the kind of figure or the name of its file cannot be."""
    from harness.reports.pictures import figures, kinds  # matplotlib, as above

    if options.figure not in kinds.KINDS:
        parser.error(
            f"--figure {options.figure}: there is no such kind{suggestion(options.figure, kinds.KINDS)}"
        )
    if not options.out or options.out.suffix not in figures.FORMATS:
        given = f"--out {options.out}" if options.out else "--figure"
        parser.error(f"{given}: name a file, --out FILE.pdf, or one in .svg or .png")


def _more(folders: Sequence[Path]) -> str:
    """Return the line below a short report that says how to see the rest of it."""
    named = [
        os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
        for folder in folders
    ]
    command = (
        shlex.join(["python", "-m", "harness.report", *named])
        if len(named) == 1
        else "this command"
    )
    return f"More: {command} --details, or --html PAGE for one page."


def print_report(folders: Sequence[Path], config_dirs: Sequence[Path] = ()) -> None:
    """Load these run folders and print their first table. `python -m harness` calls this at its
    end."""
    runs, unreadable = load_all(folders, config_dirs)
    root = Path(os.path.commonpath([folder.parent for folder in folders]))
    show("\n" + overview_text(comparisons(runs), _more([root]), colour=shows_colour(sys.stdout)))
    for message in unreadable:
        warn(f"left out: {message}")


def _written(
    tables: Sequence[Comparison],
    compared: Sequence[Comparison],
    options: Namespace,
    left_out: Sequence[str],
) -> Iterator[Path]:
    """Write the files that the options ask for, and yield each path once it is written."""
    if options.out:
        yield options.out
    if options.md:
        options.md.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(options.md, as_markdown(tables, compared))
        yield options.md
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        files.write_csv(options.csv, as_rows([*tables, *compared]))
        yield options.csv
    if options.html:
        from harness.reports.page import write_page  # matplotlib, as below

        yield write_page(options.html, tables, left_out)


if __name__ == "__main__":
    sys.exit(main())
