"""`python -m harness.rescore DIR...`: score finished runs again with the scorers of today; nothing is generated.

Outputs and first scores stay in examples.jsonl. The new scores go into rescored.jsonl beside it, and what changed into
the `rescored` section of run.json; reports then show the new ones and say so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evals.base import Task
from harness.config import plugins
from harness.config.errors import as_command, is_known, sentence
from harness.config.settings import Data, settings_of
from harness.jobs.planning.items import Item, prepare
from harness.models.base import ModelSource
from harness.results.compared import mean_score
from harness.results.files import write_lines
from harness.results.identity import of_all
from harness.results.lock import FolderLock
from harness.results.provenance import now, source_hash
from harness.results.records import Record, StoreError, scored
from harness.results.run_folder import RESCORED, StoredRun, find, load, write_info
from harness.results.summary_file import Neighbours, reference, summary_of, write_summary
from harness.terminal.notices import complain, say
from harness.terminal.paths import typed


@as_command()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.data_root is not None and not options.data_root.is_dir():
        parser.error(f"--data-root {options.data_root} is not a folder: give the one that holds the data sets")
    failed, scored_again = False, list[Path]()
    for folder in find(options.folders):
        try:
            say(rescore(folder, options.data_root))
            scored_again.append(folder)
        except Exception as error:
            if not is_known(error):
                raise
            complain(f"{folder}: {sentence(error, '--data-root FOLDER')}")
            failed = True
    _write_summaries(scored_again)
    return 2 if failed else 0


def _write_summaries(folders: Sequence[Path]) -> None:
    """Bring the copies in summary.json up to date once all folders have their new scores, Full's among them."""
    runs = [load(folder) for folder in folders]
    neighbours = Neighbours(runs)
    for run in runs:
        full = reference(run, neighbours.fulls(run))
        write_summary(run, summary_of(run, full))


def rescore(folder: Path, data_root: Path | None = None) -> str:
    """One sentence on what became of the run's scores. `data_root` in place of the run's own."""
    run = load(folder, first_scores=True)
    if run.status != "complete":
        raise StoreError("the run is not complete; finish it with the command that started it, then score it again")
    task, items = _regenerated(run.config, data_root)
    lock = FolderLock(folder)
    try:
        lines = list(_scores(run.records, task, {item.example.id: item for item in items}))
        section = _section(run, task, lines)
        section["present"]["answers"] = of_all(item.answers_sha256 for item in items)
        write_lines(folder / RESCORED, lines)
        write_info(folder, run.info | {"rescored": section})
    finally:
        lock.release()
    first, mean = (f"{100 * section[key]['mean']:.2f}" for key in ("first", "present"))
    return f"{folder.name}: {section['changed']} of {len(lines)} scores differ from the first, mean {first} -> {mean}"


def _regenerated(config: Mapping[str, Any], data_root: Path | None) -> tuple[Task, list[Item]]:
    """Return the run's task and its examples as prompts."""
    task: Task = plugins.build(config["task"], "task")
    model: ModelSource = plugins.build(config["model"], "model")
    settings = settings_of(config)
    if data_root is not None:
        settings = replace(settings, data=Data(str(data_root)))
    return task, prepare(task, model, settings, strict=False)


def _scores(records: Sequence[Record], task: Task, items: Mapping[str, Item]) -> Iterator[dict[str, Any]]:
    for record in records:
        item = items.get(record.id)
        if item is None or item.sha256 != record.prompt_sha256:
            reason = "is no longer among the task's examples" if item is None else "has another prompt today"
            raise StoreError(f"{record.id} {reason}: data, tokenizer or task have changed: run it again")
        turns = zip(item.example.turns, record.replies, strict=True)
        scores = [task.score(turn, reply.output) for turn, reply in turns]
        lines = [{"score": score.value, "details": dict(score.details)} for score in scores]
        together = scored([(score.value, score.details) for score in scores])
        yield {"id": record.id} | (together | {"turns": lines} if record.turns else lines[0])


def _section(run: StoredRun, task: Task, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What run.json says: both versions with their means, and every rescoring before this one."""
    present = [record.rescored(line) for record, line in zip(run.records, lines, strict=True)]
    changed = sum(a.score != b.score for a, b in zip(run.records, present, strict=True))
    before = run.info.get("rescored")
    origin = run.info.get("provenance") or {}
    first = {"task_version": run.info.get("task_info", {}).get("version"), "sources": origin.get("sources")}
    return {
        "first": first | {"mean": mean_score(run.records)},
        "present": {"task_version": task.version, "sources": source_hash(), "mean": mean_score(present)},
        "changed": changed,
        "at": now(),
        "earlier": [*before.get("earlier", []), _alone(before)] if before else [],
    }


def _alone(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: section[key] for key in ("present", "changed", "at")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.rescore", description=__doc__)
    parser.add_argument("folders", nargs="+", type=typed, metavar="DIR", help="folder of a run, or any above it")
    parser.add_argument(
        "--data-root", type=typed, metavar="FOLDER", help="where the data sets are now, if not where they were"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
