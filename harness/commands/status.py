"""`python -m harness.status [DIR]`: what of each sweep is done, running, failed or still to do, and when it ends.

Exit code: 0 all done, 1 something failed, 3 not finished yet, 2 where there is nothing to look at.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from harness.config.errors import as_command
from harness.config.settings import Results
from harness.results.records import StoreError
from harness.sweeps.ledger import sweeps_in
from harness.sweeps.session import last_command
from harness.sweeps.state import STATES, JobState, duration, each_once, estimate, other_runs, states_of
from harness.terminal.notices import show
from harness.terminal.paths import typed
from harness.terminal.tables import Column, text_table

NOT_FINISHED = 3


class Part(NamedTuple):
    """A sweep, or the runs beside all sweeps."""

    title: str
    command: str | None
    states: list[JobState]

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(state.status for state in self.states)
        return {status: found[status] for status in STATES if found[status]}

    @property
    def examples(self) -> str:
        """Done of all, as far as they are known."""
        states = each_once(self.states)
        known = [state.total for state in states if state.total is not None]
        more = "+" if len(known) < len(states) else ""
        return f"{sum(state.done for state in states)}/{sum(known)}{more} examples" if known else ""

    @property
    def summary(self) -> str:
        words = [", ".join(f"{count} {status}" for status, count in self.counts.items()), self.examples]
        if set(self.counts) & {"running", "to do", "interrupted"}:
            words.append(estimate(self.states).sentence("running" in self.counts))
        return "; ".join(filter(None, words))


@as_command()
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    parts = look(options.folder)
    show(json.dumps([_plain(part) for part in parts], indent=2) if options.json else page(parts))
    return exit_code(parts)


def look(root: Path) -> list[Part]:
    """The sweeps below a folder, and the runs that belong to none."""
    if not root.is_dir():
        raise StoreError(f"no such folder: {root}; give the one that results.root named, such as {Results().root}")
    sweeps = [(sweep, states_of(sweep)) for sweep in sweeps_in(root)]
    parts = [Part(str(sweep.folder), last_command(sweep), states) for sweep, states in sweeps]
    others = other_runs(root, [state for _, states in sweeps for state in states])
    parts += [Part(f"{root}: runs of no sweep", None, others)] * bool(others)
    if not parts:
        raise StoreError(f"no runs in {root}: give the folder that results.root named")
    return parts


def exit_code(parts: Sequence[Part]) -> int:
    found = {status for part in parts for status in part.counts}
    if "running" in found or (found & {"to do", "interrupted"} and "failed" not in found):
        return NOT_FINISHED
    return 1 if "failed" in found else 0


def page(parts: Sequence[Part]) -> str:
    return "\n\n".join("\n".join(_lines(part)) for part in parts)


def _lines(part: Part) -> Iterator[str]:
    yield part.title
    yield f"  {part.summary}"
    if part.command:
        yield f"  {part.command}"
    yield ""
    yield text_table(_columns(part.states))
    reasons: dict[str, list[int]] = {}
    for number, state in enumerate(part.states, 1):
        if state.reason and state.status != "done":
            reasons.setdefault(state.reason, []).append(number)
    for reason, numbers in reasons.items():
        yield f"  {', '.join(map(str, numbers))}: {reason}"


def _columns(states: Sequence[JobState]) -> list[Column]:
    workers = [f"{state.pid} on {state.host}" if state.status == "running" and state.pid else "" for state in states]
    return [
        Column("job", "", [f"{number:>2} {state.label}" for number, state in enumerate(states, 1)], left=True),
        Column("state", "", [state.status for state in states], left=True),
        Column("examples", "", [_of(state) for state in states]),
        Column("time", "", ["" if state.seconds is None else duration(state.seconds) for state in states]),
        Column("process", "", workers, left=True),
        Column("folder", "", [state.folder.name if state.folder else "" for state in states], left=True),
    ]


def _of(state: JobState) -> str:
    return f"{state.done}/{'?' if state.total is None else state.total}"


def _plain(part: Part) -> dict[str, Any]:
    guess = estimate(part.states)
    jobs = [asdict(state) for state in part.states]
    for job in jobs:
        del job["about"]
        job |= {key: str(job[key]) if job[key] else None for key in ("folder", "full")}
    left = {"seconds": guess.seconds, "basis": guess.basis}
    return {"sweep": part.title, "command": part.command, "counts": part.counts, "left": left, "jobs": jobs}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.status", description=__doc__)
    parser.add_argument(
        "folder", nargs="?", type=typed, default=Path(Results().root), metavar="DIR", help="results.root"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program, not with a traceback
    sys.exit(main())
