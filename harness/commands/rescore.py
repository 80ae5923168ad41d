"""`python -m harness.rescore DIR...`: score finished runs again with the scorers of today; nothing is generated.

Outputs and first scores stay in examples.jsonl. The new scores go into rescored.jsonl, and reports show them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evals.base import Task
from harness.config.catalogue import entries, plain
from harness.config.errors import as_command
from harness.config.plugins import PluginError, build_recorded
from harness.config.settings import Data, settings_known_today
from harness.jobs.examples import prepare
from harness.models.base import ModelSource
from harness.prompts.facts import unanswered
from harness.results.compared import averages, mean_score
from harness.results.files import write_lines
from harness.results.identity import of_all
from harness.results.lock import FolderLock
from harness.results.provenance import now
from harness.results.records import StoreError, scored
from harness.results.run_folder import RESCORED, StoredRun, find, load, write_info
from harness.results.summary import Neighbours, reference, summary_of, write_summary
from harness.terminal.arguments import Parser, config_dir
from harness.terminal.notices import say, warn


@as_command()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("rescore", __doc__)
    parser.path("folders", "DIR", "folder of a run, or any above it", nargs="+")
    parser.path("--data-root", "FOLDER", "where the data sets are now")
    parser.config_dirs("yaml files whose code may run", type=config_dir)
    options = parser.parse_args(arguments)
    runs = [load(folder, first_scores=True) for folder in find(options.folders)]
    done = list[StoredRun]()
    for run in runs:
        if run.status != "complete":
            warn(
                f"left out: {run.folder} is not complete; finish it with the command that started it"
            )
            continue
        try:
            say(rescore(run, options.data_root, options.config_dir))
            done.append(load(run.folder))
        except PluginError as error:
            warn(f"left out: {run.folder}: {error}")
    neighbours = Neighbours(done)
    for run in done:  # once all folders have their new scores, Full's among them
        write_summary(run, summary_of(run, reference(run, neighbours.beside(run))))
    return 2 if len(done) < len(runs) else 0


def rescore(run: StoredRun, data_root: Path | None, config_dirs: Sequence[Path]) -> str:
    """Score the outputs of a finished run with today's scorer and write rescored.jsonl. Return a
    sentence on what changed. `data_root` replaces the folder of data sets that the run used;
    `config_dirs`: whose plug-ins and lm-eval tasks may be used beside those that come with the harness."""
    settings = settings_known_today(run.config)
    if data_root is not None:
        settings = replace(settings, data=Data(str(data_root)))
    task: Task = build_recorded(run.config.get("task"), "task", config_dirs)
    _refuse_code(task, config_dirs)
    model: ModelSource = build_recorded(run.config.get("model"), "model", config_dirs)
    items = {item.example.id: item for item in prepare(task, model, settings)}
    lines = []
    for record in run.records:
        item = items.get(record.id)
        if item is None or item.sha256 != record.prompt_sha256:
            raise StoreError(
                f"{run.folder}: {record.id} has no such prompt today: task or data changed; run it again"
            )
        turns = list[dict[str, Any]]()
        for turn, reply in zip(item.example.turns, record.replies, strict=True):
            score = task.score(turn, reply.output)
            value = 0.0 if unanswered(reply) else score.value
            turns.append({"score": value, "details": dict(score.details)})
        together = scored([(turn["score"], turn["details"]) for turn in turns]) | {"turns": turns}
        lines.append({"id": record.id} | (together if record.turns else turns[0]))
    present = [record.rescored(line) for record, line in zip(run.records, lines, strict=True)]
    changed = sum(new.score != old.score for new, old in zip(present, run.records, strict=True))
    first, mean = mean_score(run.records), mean_score(present)
    section = {
        "first": {"task_version": run.info.get("task_info", {}).get("version"), "mean": first},
        "present": {"task_version": task.version, "mean": mean, "averages": averages(task, present)}
        | {"answers": of_all(item.answers_sha256 for item in items.values())},
        "changed": changed,
        "at": now(),
    }
    lock = FolderLock(run.folder)
    try:
        write_lines(run.folder / RESCORED, lines)
        write_info(run.folder, run.info | {"rescored": section})
    finally:
        lock.release()
    return f"{run.folder.name}: {changed} of {len(lines)} scores differ, mean {100 * first:.2f} -> {100 * mean:.2f}"


def _refuse_code(task: Task, config_dirs: Sequence[Path]) -> None:
    """Raise `PluginError` if parameters of a recorded task name code that no folder of `config_dirs`
    names."""
    # of lm-eval: its yaml files may name functions
    included: str | None = getattr(task, "include_path", None)
    if included and not any(
        Path(included).resolve().is_relative_to(trusted.resolve()) for trusted in config_dirs
    ):
        raise PluginError(
            f"task.include_path={included} may hold code, and code that records name is not run: if you trust that "
            f"folder, add --config-dir={included}."
        )
    # some tasks of lm-eval run the code of a tokenizer, and rows have a scorer of their own
    says = {"metadata": "may name a tokenizer with code", "scorer": "names code"}
    metadata: dict[str, Any] = getattr(task, "metadata", {})
    scorer: str = getattr(task, "scorer", "")
    for key, value in {"metadata": metadata, "scorer": scorer if ":" in scorer else ""}.items():
        known = [entry.values().get(key) for entry in entries("task", config_dirs).values()]
        if value and value not in known:
            raise PluginError(
                f"task.{key}={plain(value)} {says[key]}, and code that records name is not run: if you trust it, add "
                f"--config-dir=FOLDER, where FOLDER/task/NAME.yaml has the same {key}."
            )


if __name__ == "__main__":
    sys.exit(main())
