"""`python -m harness.show RUN`: what a run put out; with `--diff RUN2`, where two runs part."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from harness.config.catalogue import GROUPS, Flat, flatten, plain
from harness.config.errors import as_command
from harness.config.plugins import TARGET
from harness.config.settings import WITHOUT_EFFECT, recorded_defaults
from harness.reports.command import command
from harness.results.identity import PARTS, word
from harness.results.records import Record, Reply, StoreError
from harness.results.run_folder import ERROR, StoredRun, load
from harness.terminal.arguments import typed
from harness.terminal.notices import say, visible
from harness.terminal.tables import digits

FIRST = 20  # examples shown without --all
MARK = "▶"  # stands before the first character in which two outputs differ


@as_command()
def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    width = shutil.get_terminal_size((120, 40)).columns
    run = load(options.run)
    lines = diff(run, load(options.diff), options, width) if options.diff else show(run, options, width)
    for line in lines:
        say(line)


def show(run: StoredRun, options: argparse.Namespace, width: int) -> Iterator[str]:
    """Id, group, score and output of each example."""
    failed = {example.id for example in run.failed}
    chosen = [] if options.id in failed else _chosen(run.records, options.id, run.folder)
    shown = chosen if options.all else chosen[:FIRST]
    yield f"{run.folder.name}: {len(run.records)} examples, {run.status}"
    if run.status == "failed":
        reason = " ".join(str(run.info.get("error") or "no reason was left").split()).rstrip(".")
        yield f"It failed: {reason}."
        if (path := run.folder / ERROR).is_file():
            yield f"The traceback is in {path}."
    if run.status in ("failed", "interrupted"):
        yield f"To finish it: {command(run)} {shlex.quote(f'results.root={run.folder.parent}')}"
    for example in run.failed:
        if options.id in (None, example.id):
            yield f"\n[{example.id}] {example.group}  failed: {example.error}"
    for record in shown:
        yield ""
        yield f"{_head(record)}  {_result(record)}"
        for warning in record.warnings:
            yield f"  warning: {warning}"
        if record.details:
            yield f"  {_details(record.details)}"
        if record.trace:
            yield f"  {_breakdown(record.trace)}"
        for number, reply in enumerate(record.replies, 1):
            if record.turns:
                yield f"  turn {number}: {_result(reply)}"
            yield from _wrapped(reply.output, width - 2, "  ")
    if len(shown) < len(chosen):
        yield f"\n{len(chosen) - len(shown)} more: --all shows them, --id ID one of them"


def diff(run: StoredRun, other: StoredRun, options: argparse.Namespace, width: int) -> Iterator[str]:
    """Side by side, examples of both runs whose output differs."""
    theirs = {record.id: record for record in other.records}
    pairs = [(record, theirs[record.id]) for record in run.records if record.id in theirs]
    if not pairs:
        raise StoreError(f"{run.folder} and {other.folder} have no example in common")
    _chosen([mine for mine, _ in pairs], options.id, run.folder)
    differ = [pair for pair in pairs if pair[0].answer != pair[1].answer]
    half = max(20, (width - 3) // 2)
    yield f"{run.folder.name}  |  {other.folder.name}"
    yield f"{len(pairs)} examples in common, {len(differ)} with different outputs"
    found = apart(run, other)
    told = f"they differ in {', '.join(found)}" if found else "nothing that bears on them differs"
    yield from textwrap.wrap(told, width, subsequent_indent="  ", break_on_hyphens=False)
    for mine, their in pairs:
        if (options.all or mine.answer != their.answer) if options.id is None else mine.id == options.id:
            yield ""
            yield from _side_by_side(mine, their, half)


def apart(run: StoredRun, other: StoredRun) -> list[str]:
    """Return what differs between two runs: settings with both values, then code and versions. Of two methods, tasks or
    models only their names are returned."""
    ours, theirs = _values(run), _values(other)
    replaced = [kind for kind in GROUPS if ours.get(f"{kind}.{TARGET}") != theirs.get(f"{kind}.{TARGET}")]
    found = [f"{kind} ({_plugin(run, kind)} | {_plugin(other, kind)})" for kind in replaced]
    for key in ours | theirs:
        if key.partition(".")[0] not in replaced and _counts(key, run, other) and ours.get(key) != theirs.get(key):
            found.append(f"{key} ({plain(ours.get(key))} | {plain(theirs.get(key))})")
    ours, theirs = _identity(run), _identity(other)
    parts = [key for key in ours.keys() & theirs.keys() if key in PARTS or key.startswith("code.")]
    changed = [key for key in parts if ours[key] != theirs[key]]
    return [*found, *(word(key) for key in changed if not found or key != "prompts")]  # other tasks have other prompts


def _values(run: StoredRun) -> Flat:
    """Return the configuration without what changes no result; an older run has later settings at their defaults."""
    own = flatten(recorded_defaults()) | flatten(run.config)
    return {key: value for key, value in own.items() if not {key, key.partition(".")[0]} & set(WITHOUT_EFFECT)}


def _counts(key: str, *runs: StoredRun) -> bool:
    """Return whether a parameter that one run lacks counts as a difference: it came later, and was at its default
    unless the other run's identity names it."""
    lacking = [run for run in runs if key.partition(".")[0] in GROUPS and key not in flatten(run.config)]
    return not lacking or any(key in _identity(run) for run in runs)


def _identity(run: StoredRun) -> Flat:
    return flatten(run.info.get("identity") or {})


def _plugin(run: StoredRun, kind: str) -> str:
    """Return the name that was typed, or else the module's."""
    module = str((run.config.get(kind) or {}).get(TARGET, "none")).split(".")
    return str((run.info.get("presets") or {}).get(kind) or module[-2 if len(module) > 1 else 0])


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """Index of the first token in which two outputs differ; null where they are the same."""
    return next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)


def _side_by_side(mine: Record, their: Record, half: int) -> Iterator[str]:
    token, letter = first_difference(mine.tokens, their.tokens), first_difference(mine.output, their.output)
    yield f"{_head(mine)}  " + ("same tokens" if token is None else f"first different token: {token}")
    if mine.prompt_sha256 != their.prompt_sha256:
        yield "warning: the two prompts differ"
    texts = [text if letter is None else text[:letter] + MARK + text[letter:] for text in (mine.output, their.output)]
    heads = [_result(record) for record in (mine, their)]
    columns = [list(_wrapped(f"{head}\n{text}", half)) for head, text in zip(heads, texts, strict=True)]
    for left, right in zip_longest(*columns, fillvalue=""):
        yield f"{left:<{half}} | {right}".rstrip()


def _chosen(records: Iterable[Record], name: str | None, folder: Path) -> list[Record]:
    chosen = [record for record in records if name in (None, record.id)]
    if name is not None and not chosen:
        raise StoreError(f"no example --id {name} in {folder}: without --id all are shown")
    return chosen


def _head(record: Record) -> str:
    return f"[{record.id}] {record.group}"


def _result(record: Reply) -> str:
    return f"score {100 * record.score:.1f}, {len(record.tokens)} tokens, stop: {record.stop}"


def _details(details: Mapping[str, Any]) -> str:
    """Further readings of the same output."""
    known = {name: digits(value) if isinstance(value, float) else value for name, value in details.items()}
    return ", ".join(f"{name} {value}" for name, value in known.items())


def _breakdown(trace: Mapping[str, Any]) -> str:
    """Say where the time of a decode step went."""
    parts = ", ".join(f"{part} {digits(1e3 * seconds)}" for part, seconds in trace["parts_s"].items())
    return f"decode step, median of {trace['steps']}: {digits(1e3 * trace['step_s'])} ms ({parts})"


def _wrapped(text: str, width: int, indent: str = "") -> Iterator[str]:
    """Lines of the text stay lines."""
    for line in text.split("\n"):
        for part in textwrap.wrap(visible(line).expandtabs(4), max(10, width), drop_whitespace=False) or [""]:
            yield indent + part


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.show", description=__doc__)
    parser.add_argument("run", type=typed, metavar="RUN", help="folder of a run")
    parser.add_argument("--diff", type=typed, metavar="RUN2", help="show side by side what this run put out otherwise")
    parser.add_argument("--id", metavar="ID", help="this example only")
    parser.add_argument("--all", action="store_true", help=f"all examples, not the first {FIRST}; equal ones as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
