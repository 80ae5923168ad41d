"""Reads files that RULER's own scripts wrote, in the current layout (`answer_prefix` apart) and in
the older one (inside)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from evals.base import TaskError
from evals.data import text_of, too_few, value_of
from evals.ruler.templates import FAMILIES, TEMPLATES, FilledTemplate

RECORD = {
    "input": "text",
    "outputs": ["text that is not blank", ...],
    "answer_prefix?": "text",
    "length?": "a whole number",
}


def prompts(path: Path, task: str, samples: int) -> list[FilledTemplate]:
    """Return the prompts that the first `samples` records of a file hold, which RULER's own scripts
    wrote for a task."""
    place, content = f"task.source: {path}", path.read_bytes()
    # other line separators may stand inside a record
    lines = text_of(content, place).split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    stamp = f"official file {hashlib.sha256(content).hexdigest()[:16]}"
    found = [
        _prompt(line, task, f"{place}, line {number}", stamp) for number, line in numbered[:samples]
    ]
    if samples > len(numbered):
        raise too_few(place, "records", len(numbered), samples)
    return found


def _prompt(line: str, task: str, place: str, stamp: str) -> FilledTemplate:
    record = value_of(line, RECORD, place)
    template = TEMPLATES[FAMILIES[task]]
    user, prefix = record["input"], record.get("answer_prefix")
    if prefix is None:
        cut = template.prefix_start(user)
        if cut < 0:
            raise TaskError(f"{place}: does not end with the answer prefix of {task}")
        user, prefix = user[:cut], user[cut:]
    start = template.question_start(user)
    if start < 0 or not template.opens(user):
        raise TaskError(
            f"{place}: is no {task} prompt, or stands in a chat template: write it with `base`"
        )
    data = {"generator": stamp}
    if record.get("length") is not None:
        data["tokens"] = record["length"]
    return FilledTemplate(user[:start], user[start:], prefix, tuple(record["outputs"]), data)


def find(
    source: Path, tasks: Sequence[str], lengths: Sequence[int]
) -> Iterator[tuple[Path, str, int]]:
    """Yield the file of each length and task, with both, from the folder `source` that RULER's own
    scripts wrote."""
    if not source.is_dir():
        raise TaskError(
            f"task.source={source} is not a folder: name the one that the official scripts wrote"
        )
    for length, task in product(lengths, tasks):
        # a file that is in no folder of its length is taken only where that is the one asked for
        folders = (f"{length}/", "") if len(lengths) == 1 else (f"{length}/",)
        files = (f"{task}/validation.jsonl", f"{task}.jsonl")
        places = ["".join(parts) for parts in product(folders, files)]
        path = next((source / place for place in places if (source / place).is_file()), None)
        if path is None:
            there = sorted({str(file.relative_to(source)) for file in source.rglob("*.jsonl")})
            raise TaskError(
                f"task.source={source} has no {task} at {length} ({' or '.join(places)}); it holds "
                f"{', '.join(there) or 'no .jsonl'}: set task.tasks and task.lengths to that"
            )
        yield path, task, length
