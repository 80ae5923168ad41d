"""`python -m harness.show RUN`: what a run put out; with `--diff RUN2`, where two runs part."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from harness.config.catalogue import flatten, plain
from harness.config.errors import as_command
from harness.config.settings import WITHOUT_EFFECT, recorded_defaults
from harness.prompts.facts import TOKENS, unanswered
from harness.reports.rerun import command
from harness.results.identity import PARTS, word
from harness.results.records import Record, Reply, StoreError
from harness.results.run_folder import ERROR, StoredRun, load
from harness.terminal.arguments import Parser
from harness.terminal.notices import say, visible
from harness.terminal.tables import digits

FIRST = 20  # examples shown without --all
MARK = "▶"  # stands before the first character in which two outputs differ


@as_command()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("show", __doc__)
    parser.path("run", "RUN", "folder of a run")
    parser.path("--diff", "RUN2", "show side by side what this run put out otherwise")
    parser.add_argument("--id", metavar="ID", help="this example only")
    parser.flag("--all", f"all examples, not the first {FIRST}; equal ones as well")
    options = parser.parse_args(arguments)
    width = shutil.get_terminal_size((120, 40)).columns
    run = load(options.run)
    known = {record.id for record in run.records}
    known |= {example.id for example in (*run.failed, *run.skipped)}
    if options.id and options.id not in known:
        raise StoreError(
            f"no example --id {options.id} in {run.folder}: without --id all are shown"
        )
    lines = (
        diff(run, load(options.diff), options, width) if options.diff else show(run, options, width)
    )
    for line in lines:
        say(line)


def show(run: StoredRun, options: Namespace, width: int) -> Iterator[str]:
    """Yield lines on a run: its state, then id, group, score and output of each example."""
    yield f"{run.folder.name}: {len(run.records)} examples, {run.status}"
    if run.status == "failed":
        yield f"It failed: {' '.join(str(run.info.get('error')).split())} ({run.folder / ERROR} has the traceback)."
    if run.status in ("failed", "interrupted"):
        yield f"To finish it: {command(run)} {shlex.quote(f'results.root={run.folder.parent}')}"
    for example in (*run.failed, *run.skipped):
        if options.id in (None, example.id):
            became = "failed" if example.kind == "error" else "left out"
            yield f"\n[{example.id}] {example.group}  {became}: {example.why}"
    chosen = [record for record in run.records if options.id in (None, record.id)]
    shown = chosen if options.all else chosen[:FIRST]
    for record in shown:
        yield f"\n[{record.id}] {record.group}  {_result(record)}"
        yield from (f"  warning: {warning}" for warning in record["warnings"])
        if record.details:
            details = {
                name: digits(x) if isinstance(x, float) else x for name, x in record.details.items()
            }
            yield "  " + ", ".join(f"{name} {value}" for name, value in details.items())
        for number, reply in enumerate(record.replies, 1):
            if record.turns:
                yield f"  turn {number}: {_result(reply)}"
            yield from (f"  {line}" for line in _wrapped(reply.output, width - 2))
    if len(shown) < len(chosen):
        yield f"\n{len(chosen) - len(shown)} more: --all shows them, --id ID one of them"


def diff(run: StoredRun, other: StoredRun, options: Namespace, width: int) -> Iterator[str]:
    """Yield lines on two runs: the settings and versions that differ, then the examples whose
    outputs differ, side by side."""
    theirs = {record.id: record for record in other.records}
    pairs = [(record, theirs[record.id]) for record in run.records if record.id in theirs]
    if not pairs:
        raise StoreError(f"{run.folder} and {other.folder} have no example in common")
    differ = [pair for pair in pairs if pair[0].answer != pair[1].answer]
    yield f"{run.folder.name}  |  {other.folder.name}"
    yield f"{len(pairs)} examples in common, {len(differ)} with different outputs"
    keys = differing(run, other)
    summary = f"they differ in {', '.join(keys)}" if keys else "nothing that bears on them differs"
    yield from textwrap.wrap(summary, width, subsequent_indent="  ", break_on_hyphens=False)
    for mine, their in pairs:
        if (
            (options.all or mine.answer != their.answer)
            if options.id is None
            else mine.id == options.id
        ):
            yield from _side_by_side(mine, their, max(20, (width - 3) // 2))


def differing(run: StoredRun, other: StoredRun) -> list[str]:
    """Return a text for each thing that differs between two runs: settings with both values, then
    code and versions. A setting that an older run does not know counts as its default."""
    usual = flatten(recorded_defaults())
    ours = usual | flatten(run.config)
    theirs = usual | flatten(other.config)
    effective = [key for key in ours | theirs if not {key, key.split(".")[0]} & {*WITHOUT_EFFECT}]
    keys = [key for key in effective if ours.get(key) != theirs.get(key)]
    mine = flatten(run.info.get("identity") or {})
    their = flatten(other.info.get("identity") or {})
    parts = [key for key in mine.keys() & their.keys() if mine[key] != their[key]]
    values = [f"{key} ({plain(ours.get(key))} | {plain(theirs.get(key))})" for key in keys]
    return [*values, *(word(key) for key in parts if key in PARTS or key.startswith("code."))]


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """Return the index of the first item in which two outputs differ; None if they are equal."""
    return next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)


def _side_by_side(mine: Record, their: Record, half: int) -> Iterator[str]:
    token = first_difference(mine.tokens, their.tokens)
    letter = first_difference(mine.output, their.output)
    same = "same tokens" if token is None else f"first different token: {token}"
    yield f"\n[{mine.id}] {mine.group}  {same}"
    if mine.prompt_sha256 != their.prompt_sha256:
        yield "warning: the two prompts differ"
    columns = []
    for record in (mine, their):
        text = (
            record.output
            if letter is None
            else record.output[:letter] + MARK + record.output[letter:]
        )
        columns.append(list(_wrapped(f"{_result(record)}\n{text}", half)))
    for left, right in zip_longest(*columns, fillvalue=""):
        yield f"{left:<{half}} | {right}".rstrip()


def _result(record: Reply) -> str:
    thought = f", {record[TOKENS]} of them a thought" if record[TOKENS] else ""
    cut = " that did not end, so there is no answer" if unanswered(record) else ""
    return f"score {100 * record.score:.1f}, {len(record.tokens)} tokens{thought}{cut}, stop: {record.stop}"


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Yield the text as lines of at most `width` characters; its own line breaks stay."""
    for line in text.split("\n"):
        yield from textwrap.wrap(
            visible(line).expandtabs(4), max(10, width), drop_whitespace=False
        ) or [""]


if __name__ == "__main__":
    sys.exit(main())
