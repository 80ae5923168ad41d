"""`python -m harness.rescore DIR...`: score finished runs again with the scorers of today; nothing is generated.

Outputs and first scores stay in examples.jsonl. The new scores go into rescored.jsonl, and reports show them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evals.base import Task
from harness.config import plugins
from harness.config.errors import as_command, is_known, sentence
from harness.config.settings import Data, settings_of
from harness.jobs.planning.examples import PreparedExample, prepare
from harness.results.compared import mean_score
from harness.results.files import write_lines
from harness.results.identity import of_all
from harness.results.lock import FolderLock
from harness.results.provenance import now, source_hash
from harness.results.records import Record, StoreError, scored
from harness.results.run_folder import RESCORED, find, load, write_info
from harness.results.summary import Neighbours, reference, summary_of, write_summary
from harness.terminal.arguments import typed
from harness.terminal.notices import complain, say


@as_command()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.rescore", description=__doc__)
    parser.add_argument("folders", nargs="+", type=typed, metavar="DIR", help="folder of a run, or any above it")
    parser.add_argument("--data-root", type=typed, metavar="FOLDER", help="where the data sets are now")
    options = parser.parse_args(arguments)
    if options.data_root is not None and not options.data_root.is_dir():
        parser.error(f"--data-root {options.data_root} is not a folder: give the one that holds the data sets")
    folders, done = find(options.folders), list[Path]()
    for folder in folders:
        try:
            say(rescore(folder, options.data_root))
            done.append(folder)
        except Exception as error:
            if not is_known(error):
                raise
            complain(f"{folder}: {sentence(error, '--data-root FOLDER')}")
    neighbours = Neighbours([load(folder) for folder in done])
    for run in map(load, done):  # once all folders have their new scores, Full's among them
        write_summary(run, summary_of(run, reference(run, neighbours.fulls(run))))
    return 2 if len(done) < len(folders) else 0


def rescore(folder: Path, data_root: Path | None = None) -> str:
    """Score the outputs of a run again, and return a sentence on what changed. `data_root` replaces the run's own."""
    run = load(folder, first_scores=True)
    if run.status != "complete":
        raise StoreError("the run is not complete; finish it with the command that started it, then score it again")
    settings = settings_of(run.config)
    if data_root is not None:
        settings = replace(settings, data=Data(str(data_root)))
    task: Task = plugins.build(run.config["task"], "task")
    items = prepare(task, plugins.build(run.config["model"], "model"), settings, strict=False)
    by_id = {item.example.id: item for item in items}
    lines = [_line(record, task, by_id.get(record.id)) for record in run.records]
    present = [record.rescored(line) for record, line in zip(run.records, lines, strict=True)]
    changed = sum(a.score != b.score for a, b in zip(run.records, present, strict=True))
    first, mean = mean_score(run.records), mean_score(present)
    answers = of_all(item.answers_sha256 for item in items)
    section = {
        "first": {"task_version": run.info.get("task_info", {}).get("version"), "mean": first},
        "present": {"task_version": task.version, "sources": source_hash(), "mean": mean, "answers": answers},
        "changed": changed,
        "at": now(),
    }
    lock = FolderLock(folder)
    try:
        write_lines(folder / RESCORED, lines)
        write_info(folder, run.info | {"rescored": section})
    finally:
        lock.release()
    told = f"{100 * first:.2f} -> {100 * mean:.2f}"
    return f"{folder.name}: {changed} of {len(lines)} scores differ from the first, mean {told}"


def _line(record: Record, task: Task, item: PreparedExample | None) -> Mapping[str, Any]:
    """Return a line of rescored.jsonl."""
    if item is None or item.sha256 != record.prompt_sha256:
        reason = "is no longer among the task's examples" if item is None else "has another prompt today"
        raise StoreError(f"{record.id} {reason}: data, tokenizer or task have changed: run it again")
    turns = zip(item.example.turns, record.replies, strict=True)
    scores = [task.score(turn, reply.output) for turn, reply in turns]
    lines = [{"score": score.value, "details": dict(score.details)} for score in scores]
    together = scored([(score.value, score.details) for score in scores])
    return {"id": record.id} | (together | {"turns": lines} if record.turns else lines[0])


if __name__ == "__main__":
    sys.exit(main())
