"""Reads files that RULER's own scripts wrote, in the current layout (`answer_prefix` apart) and in
the older one (inside)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class OfficialFile:
    """Describe one file of prompts that RULER's own scripts wrote: its path, its task and its
    length in tokens."""

    path: Path
    task: str
    length: int

    def prompts(self, samples: int) -> list[FilledTemplate]:
        """Return the prompts that the first `samples` records of the file hold."""
        content = self.path.read_bytes()
        # other line separators may stand inside a record
        lines = text_of(content, self._place).split("\n")
        numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        stamp = f"official file {hashlib.sha256(content).hexdigest()[:16]}"
        prompts = [self._prompt(line, number, stamp) for number, line in numbered[:samples]]
        if samples > len(numbered):
            raise too_few(self._place, "records", len(numbered), samples)
        return prompts

    def _prompt(self, line: str, number: int, stamp: str) -> FilledTemplate:
        record = value_of(line, RECORD, f"{self._place}, line {number}")
        template = TEMPLATES[FAMILIES[self.task]]
        user, prefix = record["input"], record.get("answer_prefix")
        if prefix is None:
            cut = template.prefix_start(user)
            if cut < 0:
                raise self._error(number, f"does not end with the answer prefix of {self.task}")
            user, prefix = user[:cut], user[cut:]
        start = template.question_start(user)
        if start < 0 or not template.opens(user):
            raise self._error(
                number,
                f"is no {self.task} prompt, or stands in a chat template: write it with `base`",
            )
        data = {"generator": stamp}
        if record.get("length") is not None:
            data["tokens"] = record["length"]
        return FilledTemplate(user[:start], user[start:], prefix, tuple(record["outputs"]), data)

    def _error(self, number: int, what: str) -> TaskError:
        return TaskError(f"{self._place}, line {number}: {what}")

    @property
    def _place(self) -> str:
        return f"task.source: {self.path}"


def find(source: Path, tasks: Sequence[str], lengths: Sequence[int]) -> Iterator[OfficialFile]:
    """Yield the file of each length and task, from the folder `source` that RULER's own scripts
    wrote."""
    if not source.is_dir():
        raise TaskError(
            f"task.source={source} is not a folder: name the one that the official scripts wrote"
        )
    for length in lengths:
        for task in tasks:
            yield OfficialFile(
                _in_folder(source, task, length, only_length=len(lengths) == 1), task, length
            )


def _in_folder(source: Path, task: str, length: int, *, only_length: bool) -> Path:
    """Return the path of the file for a task and length. A file that is in no folder of its length
    is taken only where that is the one length asked for (`only_length`)."""
    places = [
        source / str(length) / task / "validation.jsonl",
        source / str(length) / f"{task}.jsonl",
    ]
    if only_length:
        places += [source / task / "validation.jsonl", source / f"{task}.jsonl"]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        looked = " or ".join(str(place.relative_to(source)) for place in places)
        there = sorted({str(file.relative_to(source)) for file in source.rglob("*.jsonl")})
        raise TaskError(
            f"task.source={source} has no {task} at {length} ({looked}); it holds {', '.join(there) or 'no .jsonl'}: "
            "set task.tasks and task.lengths to that"
        )
    return path
