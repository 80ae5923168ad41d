"""`python -m harness.bands`: the stored bands of Full; with folders of finished runs, derive them from these.

A table whose Full lies outside its band opens with an alarm. Bands come from runs that were looked at and published:
derive them again whenever the published tables are made anew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from harness.config.errors import as_command
from harness.results import bands
from harness.results.records import StoreError
from harness.results.run_folder import find, load
from harness.terminal.notices import say
from harness.terminal.paths import typed
from harness.terminal.tables import Column, percent, text_table


@as_command()
def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.folders:
        made = bands.derived([load(folder) for folder in find(options.folders)])
        if not made:
            raise StoreError("no finished run of Full in these folders: run one with method=full")
        bands.write(made, options.file)
        say(f"{len(made)} band{'s' * (len(made) > 1)} written to {options.file}")
    say(_table(bands.stored(options.file)))


def _table(known: Sequence[bands.Band]) -> str:
    """A row per group of examples."""
    rows = [(band, name, told) for band in known for name, told in band.plain()["groups"].items()]
    about = [band.about for band, _, _ in rows]
    return text_table(
        [
            Column("group", "", [name for _, name, _ in rows], left=True),
            Column("model", "", [str(one["model"]) for one in about], left=True),
            Column("dtype", "", [str(one["dtype"]) for one in about], left=True),
            Column("conditions", "", [_conditions(one) for one in about], left=True),
            Column("Full", "", [percent(told["mean"]) for _, _, told in rows]),
            Column("range", "90%", [" to ".join(map(percent, told["range"])) for _, _, told in rows]),
            Column("n", "", [str(told["n"]) for _, _, told in rows]),
        ]
    )


def _conditions(about: bands.About) -> str:
    """What is not the default, as the command line writes it."""
    task = {f"task.{key}": value for key, value in about["task"].items() if key != "_target_"}
    chat = {} if about["chat"] == "template" else {"chat": about["chat"]}
    given = task | chat | {f"generation.{key}": value for key, value in about["generation"].items()}
    return " ".join(f"{key}={str(value)[:40]}" for key, value in given.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.bands", description=__doc__)
    parser.add_argument("folders", nargs="*", type=typed, metavar="DIR", help="folder of a run, or any above it")
    parser.add_argument("--file", type=typed, default=bands.FILE, help="where bands are kept (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
