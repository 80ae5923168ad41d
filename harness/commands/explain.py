"""`python -m harness.explain RUN...`: why a run scores low or is slow, from what is stored, and what to run next."""

from __future__ import annotations

import argparse
import signal
import sys
import textwrap
from collections.abc import Sequence

from harness.config.errors import as_command
from harness.diagnosis import quality, speed
from harness.diagnosis.next_steps import next_steps
from harness.diagnosis.subject import Subject, subject
from harness.reports.command import command
from harness.reports.compare import comparisons
from harness.reports.labels import budget, labels
from harness.reports.needles import cause_table
from harness.results.run_folder import find, load_all
from harness.results.summary_file import Neighbours
from harness.terminal.notices import say, warn
from harness.terminal.paths import typed
from harness.terminal.tables import text_table

WIDTH = 100


@as_command()
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    runs, damage = load_all(find(options.folders))
    for text in damage:
        warn(f"left out: {text}")
    neighbours = Neighbours(runs)
    subjects = [subject(run, neighbours) for run in runs]
    say("\n\n".join(explanation(one) for one in subjects))
    for table in comparisons([one.run for one in subjects]):
        if columns := cause_table(table):
            say(f"\n{table.title}\n\n{text_table(columns)}")
    return 2 if damage else 0


def explanation(one: Subject) -> str:
    """A paragraph on the score, one on the times, and the commands that would tell more."""
    paragraphs = [" ".join(quality.sentences(one)), " ".join(speed.sentences(one))]
    filled = [textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False) for text in paragraphs if text]
    steps = [f"{what}:\n    {line}" for what, line in next_steps(one, command(one.run))]
    commands = ["Next,\n" + "\n".join(steps)] if steps else []
    return "\n\n".join([_head(one), *filled, *commands])


def _head(one: Subject) -> str:
    (label,) = labels([one.run])
    row = one.summary
    name = f"{label} {budget(row)}".strip()
    return f"{one.run.folder.name}: {name} on {row['task']}, {row['model']}, protocol={row['protocol']}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.explain", description=__doc__)
    parser.add_argument("folders", nargs="+", type=typed, metavar="RUN", help="folder of a run, or any above it")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program, not with a traceback
    sys.exit(main())
