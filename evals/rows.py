"""Asks the rows of a file of one's own: each holds a context, a question and right answers, or a chat
and right answers.

The file is JSON lines, JSON, CSV or Parquet, and its SHA-256 is part of the task's version, and so
of a run's identity."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from evals.base import Example, Score, Task, TaskEnv, TaskError
from evals.data import CORRECT, NAMED_FILES, Content, Row, Shape, misfit, rows_of
from evals.metrics.answers import qa_f1
from evals.metrics.rouge import rouge_l
from evals.scbench.scoring import OPTIONS, choice, contains_any

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_TEXT = "text that is not blank"
_NAME = f"{_TEXT} or a whole number"
_MESSAGES: Shape = [{"role": "text", "content": "text"}, ...]
Scorer = Callable[[str, Sequence[str]], Any]  # of an output and its right answers


def _best(metric: Callable[[str, str], float]) -> Scorer:
    """Return the scorer that compares an output with each answer and takes the best."""
    return lambda output, answers: max(metric(output, answer) for answer in answers)


class _Known(NamedTuple):
    score: Scorer
    metric: str
    chance: float | None = None


SCORERS: Mapping[str, _Known] = {
    "exact": _Known(lambda output, answers: output.strip() in answers, "exact match", 0.0),
    "contains": _Known(contains_any, "answer contained", 0.0),
    "f1": _Known(_best(qa_f1), "F1"),
    "rouge": _Known(_best(rouge_l), "ROUGE-L"),
    "choice": _Known(choice, "accuracy", 1 / len(OPTIONS)),
}


class _Asked(NamedTuple):
    """Hold the fields of an `Example` that a row fills."""

    context: str
    question: str
    references: tuple[str, ...]
    system: str = ""
    earlier: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rows(Task):
    """Make an example of each row of the file `source`. `context`, `question`, `answers`,
    `messages` and `group` are the names of its columns. If there is no column of questions, a row
    is a chat: the user's last message in `messages` is the question, and the reply to it is the
    right answer unless the column of answers has one. `template` holds {context} and {question}.
    `scorer`: one of SCORERS, or MODULE:FUNCTION; it is called with an output and a tuple of right
    answers, and returns a number from 0 to 1."""

    seeded = False

    source: str
    context: str = "context"
    question: str = "question"
    answers: str = "answers"
    messages: str = "messages"
    group: str | None = None
    template: str = "{context}\n\n{question}"
    scorer: str = "contains"
    samples: int | None = None
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        self._refuse_below("leaves nothing: give {} or more", samples=1, max_new_tokens=1)
        if self.scorer not in SCORERS and not all(self.scorer.partition(":")):
            raise TaskError(
                f"task.scorer={self.scorer} is unknown: choose one of {', '.join(SCORERS)}, or name a function of "
                "yours as MODULE:FUNCTION"
            )
        # a command line cannot hold a line break
        object.__setattr__(self, "template", self.template.replace(r"\n", "\n"))
        if unknown := {*re.findall(r"(?<![\w{]){[^\W\d]\w*}", self.template)} - {
            "{context}",
            "{question}",
        }:
            raise TaskError(
                f"task.template holds {', '.join(sorted(unknown))}, which no text replaces: write {{context}} and "
                "{question}, and name other columns by task.context and task.question"
            )
        before, _, after = self.template.rpartition("{context}")
        if "{context}" in before or "{question}" in before or "{question}" not in after:
            raise TaskError(
                f"task.template={self.template!r} must hold {{question}}, and {{context}} only before it and once: "
                "what follows the context is not known when protocol=context seals it"
            )

    @property
    def version(self) -> str:  # type: ignore[override]
        """Return a text that changes with any byte of the file."""
        return f"1, sha256 {self._opened.get('sha256') or self._read().sha256}"

    @property
    def metric(self) -> str:  # type: ignore[override]
        return SCORERS[self.scorer].metric if self.scorer in SCORERS else self.scorer

    @property
    def chance(self) -> float | None:  # type: ignore[override]
        return SCORERS[self.scorer].chance if self.scorer in SCORERS else None

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the module of the user's own scorer; a run's identity contains a hash of its code."""
        return () if self.scorer in SCORERS else (self.scorer.partition(":")[0],)

    def require(self, data_root: Path | None) -> None:
        if self._file.suffix not in SUFFIXES:
            raise TaskError(
                f"task.source={self.source} should end in one of {', '.join(SUFFIXES)}: convert or rename it"
            )
        if not self._file.is_file():
            raise TaskError(
                f"task.source={self.source} is not there: name a file, relative to {Path.cwd()}"
            )
        _ = self._function

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        """Yield the examples of the first `samples` rows, once all rows have been checked."""
        self.require(env.data_root)
        opened = rows_of(self._read(), "task.source", remedy=CORRECT)
        self._opened.update(opened.provenance)
        stem, units = self._file.stem, dict[str, str]()
        asked = self._asked(opened.rows)
        paired = islice(zip(opened.rows, asked, strict=True), self.samples)
        for number, (row, one) in enumerate(paired, 1):
            name = f"{stem}-{number}"
            yield Example(
                id=name,
                group=stem if self.group is None else str(row[self.group]),
                **one._asdict(),
                max_new_tokens=self.max_new_tokens,
                # several questions on one context count as one
                unit=units.setdefault(one.context, name) if one.context else None,
            )

    def score(self, example: Example, output: str) -> Score:
        if self.scorer in SCORERS:
            return Score(float(self._function(output, example.references)))
        try:
            value = self._function(output, example.references)
        except Exception as error:
            raise TaskError(
                f"task.scorer={self.scorer} ended with {error!r} for {example.id}: correct it, and rescore the run"
            ) from error
        if not isinstance(value, Real) or not 0 <= float(value) <= 1:
            raise TaskError(
                f"task.scorer={self.scorer} gave {value!r} for {example.id}: let it return a number from 0 to 1"
            )
        return Score(float(value))

    @property
    def _file(self) -> Path:
        return Path(self.source).expanduser()

    @cached_property
    def _function(self) -> Scorer:
        if self.scorer in SCORERS:
            return SCORERS[self.scorer].score
        module, _, name = self.scorer.partition(":")
        try:
            function = getattr(import_module(module), name)
        except Exception as error:  # its module runs whatever its author wrote
            absent = isinstance(error, ModuleNotFoundError)
            raise TaskError(
                f"task.scorer={self.scorer} cannot be imported ({error}): "
                f"{'is its folder on PYTHONPATH?' if absent else 'correct it'}"
            ) from error
        if not callable(function):
            raise TaskError(f"task.scorer={self.scorer} is no function: name one")
        scorer: Scorer = function
        return scorer

    def _read(self) -> Content:
        data = self._file.read_bytes()
        return Content(data, f"local:{self.source}", hashlib.sha256(data).hexdigest())

    def _asked(self, rows: Sequence[Row]) -> list[_Asked]:
        """Return what each row asks. Raises `TaskError` for a column that is not there, or for the
        rows that are wrong."""
        columns = dict.fromkeys(name for row in rows for name in row)
        chat = self.question not in columns and self.messages in columns
        keys = ["group"] * (self.group is not None)
        if not chat:
            keys += ["context"] * ("{context}" in self.template) + ["question", "answers"]
        for key in keys:
            if (name := getattr(self, key)) not in columns:
                raise TaskError(
                    f"task.{key}={name} is no column of {self.source}: choose one of {', '.join(columns)}"
                )
        asked, faults = list[_Asked](), list[str]()
        for number, row in enumerate(rows, 1):
            try:
                asked.append(self._said(row) if chat else self._filled(row))
            except TaskError as error:
                faults.append(f"row {number} {error}")
        if faults:
            more = len(faults) - NAMED_FILES
            rest = f"; {more} more rows are wrong" if more > 0 else ""
            named = "; ".join(faults[:NAMED_FILES])
            raise TaskError(f"{self.source}: {named}{rest}: {CORRECT}")
        return asked

    def _filled(self, row: Row) -> _Asked:
        """Return the template filled with a row's texts. Raises `TaskError`, which says what is wrong
        after the row's number."""
        before, document, after = self.template.rpartition("{context}")
        texts: dict[str, Shape] = {self.question: _TEXT}
        if document:
            texts[self.context] = _TEXT
        answers = self._answers(row, row.get(self.answers), texts)
        question = after.replace("{question}", row[self.question])
        if not document:  # then the whole prompt is the context
            return _Asked(question, "", answers)
        return _Asked(before + row[self.context], question, answers)

    def _said(self, row: Row) -> _Asked:
        """Return a row's chat, without the reply to its last question. Raises `TaskError` as `_filled`
        does."""
        messages = self._listed(row.get(self.messages))
        if wrong := misfit(messages, _MESSAGES, self.messages):
            raise TaskError(wrong)
        said = [(message["role"], message["content"]) for message in messages]
        system = said.pop(0)[1] if said[0][0] == "system" else ""
        reply = said.pop()[1] if said and said[-1][0] == "assistant" else None
        if [role for role, _ in said] != ["user", *("assistant", "user") * (len(said) // 2)]:
            raise TaskError(
                f"has {self.messages!r} in which user and assistant do not take turns from the user's first on"
            )
        *earlier, question = (text for _, text in said)
        answers = self._answers(row, row.get(self.answers, reply), {})
        return _Asked("", question, answers, system, tuple(earlier))

    def _answers(self, row: Row, given: Any, shape: dict[str, Shape]) -> tuple[str, ...]:
        """Return the right answers of a row, whose columns are checked against `shape`, too."""
        given = self._listed(given)
        held = (
            row
            if given is None
            else row | {self.answers: given if isinstance(given, list) else [given]}
        )
        wanted = f"{_NAME} or a list of texts" if given is None else [_NAME, ...]
        shape = shape | {self.answers: wanted}
        if self.group is not None:
            shape |= {self.group: _NAME}
        for name, kind in shape.items():
            wrong = misfit(held[name], kind, name) if name in held else f"lacks {name!r}"
            if wrong:
                raise TaskError(wrong)
        answers = tuple(str(answer).strip() for answer in held[self.answers])
        if self.scorer == "choice" and not {*answers} & {*OPTIONS}:
            raise TaskError(
                f"has no letter {OPTIONS[0]} to {OPTIONS[-1]} in {self.answers!r}, which task.scorer=choice reads"
            )
        return answers

    def _listed(self, value: Any) -> Any:
        """Return a value of a row. If it is a cell of CSV that holds a list as JSON, return that
        list."""
        if self._file.suffix == ".csv" and value and value.startswith("["):
            with suppress(ValueError):
                return json.loads(value)
        return value
