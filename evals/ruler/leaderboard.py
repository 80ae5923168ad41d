"""Reads the prompts of kvpress's leaderboard: RULER as the data set simonjegou/ruler on the hub has it,
one file per length with 500 rows for each of the 13 tasks.

Its layout is that of https://github.com/NVIDIA/kvpress, evaluation/benchmarks/ruler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from evals.base import TaskEnv, TaskError
from evals.data import Source, open_rows, too_few
from evals.ruler.templates import FilledTemplate

REPO = "simonjegou/ruler"
LENGTHS = (4096, 8192, 16384)
FILE = "test-00000-of-00001.parquet"
ROW = {
    "context": "text that is not blank",
    "question": "text that is not blank",
    "answer_prefix": "text",
    "answer": ["text that is not blank", ...],
    "task": "text",
    "max_new_tokens": "a whole number above 0",
}


def file_of(length: int) -> Source:
    """Return where the rows of a length are. Of several parquet files none is taken: one alone
    would be a part of the rows."""
    places = [
        f"{folder}/{length}/{name}"
        for folder in (REPO, "ruler")
        for name in (FILE, "test.parquet", "test.jsonl")
    ]
    if length not in LENGTHS:  # a file of the user's own
        other = f"{REPO}/{length} (the data set has lengths {', '.join(map(str, LENGTHS))})"
        return Source(name=other, local=tuple(places))
    return Source(
        name=f"{REPO}/{length}", local=tuple(places), hub_repo=REPO, hub_file=f"{length}/{FILE}"
    )


def prompts(
    env: TaskEnv, tasks: Sequence[str], length: int, samples: int
) -> Iterator[tuple[str, list[FilledTemplate], dict[str, object]]]:
    """Yield each task with the prompts of its first `samples` rows, and where these come from."""
    contents = open_rows(file_of(length), env, ROW)
    stamp = f"{REPO} {contents.sha256[:16]}"
    for task in tasks:
        rows = [row for row in contents.rows if row["task"] == task]
        if not rows:
            there = ", ".join(sorted({row["task"] for row in contents.rows}))
            raise TaskError(
                f"{REPO}/{length}: {contents.origin} has no {task}, but {there}: set task.tasks to these"
            )
        if len(rows) < samples:
            raise too_few(
                f"{REPO}/{length}: {contents.origin}", f"rows of {task}", len(rows), samples
            )
        yield task, [_prompt(row, stamp) for row in rows[:samples]], contents.provenance


def _prompt(row: dict[str, Any], stamp: str) -> FilledTemplate:
    return FilledTemplate(
        row["context"],
        row["question"],
        row["answer_prefix"],
        tuple(row["answer"]),
        {"generator": stamp},
        apart=True,
        new_tokens=row["max_new_tokens"],
    )
