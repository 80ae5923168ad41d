"""`python -m harness.status [DIR]`: how far the runs below a folder are.

Exit code: 0 all done, 1 something failed, 3 not finished yet, 2 where there is nothing to look at.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.config.errors import as_command
from harness.config.settings import Results
from harness.results.files import read_lines, whole_lines
from harness.results.lock import is_locked, owner
from harness.results.records import StoreError
from harness.results.run_folder import EXAMPLES, find, read_info
from harness.sweeps.begun import waiting
from harness.terminal.arguments import Parser
from harness.terminal.notices import say
from harness.terminal.tables import Column, text_table

STATES = ("done", "running", "failed", "interrupted", "not begun")
NOT_FINISHED = 3


class RunState(NamedTuple):
    """The progress of one run, or a job of a sweep that never began. `done`: how many of its examples have an
    answer."""

    name: str  # of its folder, or the words that tell the job from the others of its sweep
    state: str  # one of STATES
    done: int
    total: int | None
    note: str = ""  # who writes it, or why it failed


@as_command()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("status", __doc__)
    parser.path("folder", "DIR", "results.root", nargs="?", default=Path(Results().root))
    folder = parser.parse_args(arguments).folder
    runs = [
        RunState(label, "not begun", 0, None, "the same command runs it")
        for label in waiting(folder)
    ]
    try:
        runs = [*map(state_of, find([folder])), *runs]
    except StoreError:
        if not runs:
            raise
    counts = Counter(run.state for run in runs)
    say(", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]))
    columns = [
        Column("run", "", [run.name for run in runs], left=True),
        Column("state", "", [run.state for run in runs], left=True),
        Column(
            "examples",
            "",
            [f"{run.done}/{'?' if run.total is None else run.total}" for run in runs],
        ),
        Column("", "", [run.note for run in runs], left=True),
    ]
    say(text_table(columns))
    if counts["running"] or (counts["interrupted"] + counts["not begun"] and not counts["failed"]):
        return NOT_FINISHED
    return 1 if counts["failed"] else 0


def state_of(folder: Path) -> RunState:
    """Return the progress of the run in a folder. A run that has not recorded an end and that no
    process is writing was killed: it is `interrupted`."""
    try:
        info = read_info(folder)
        lines = [plain for _, plain in read_lines(folder / EXAMPLES)]
    except StoreError as error:
        return RunState(
            folder.name, "failed", len(whole_lines(folder / EXAMPLES)), None, str(error)
        )
    done = sum(not {"error", "skipped"} & plain.keys() for plain in lines)
    total, status = info.get("num_expected"), info.get("status")
    if status == "complete":
        skipped = len({plain["id"] for plain in lines if "skipped" in plain})
        failed = total - done - skipped if total else 0
        notes = [f"{failed} failed; the same command tries them again"] * (failed > 0)
        notes += [f"{skipped} too long, left out"] * (skipped > 0)
        return RunState(folder.name, "done", done, total, ", ".join(notes))
    if is_locked(folder):
        return RunState(folder.name, "running", done, total, owner(folder))
    state = "failed" if status == "failed" else "interrupted"
    return RunState(folder.name, state, done, total, str(info.get("error") or ""))


if __name__ == "__main__":
    sys.exit(main())
