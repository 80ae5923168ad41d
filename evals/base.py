"""The contract of a task: examples made of text, and a pure score.

A task is one frozen dataclass (its hyper-parameters, all of them listed in `conf/task/NAME.yaml`) with two
methods. It never sees a tokenizer object, a tensor or a model: lengths are asked of a `TextTools`, files
looked for below a data root, both handed over in a `TaskEnv`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

NO_DATA_ROOT = "(none is set)"  # in errors; who knows how one is named says so


class TaskError(ValueError):
    """What a user asked of a task cannot be done; the message says what to do instead."""


class TextTools(Protocol):
    """What a task may know of the model's tokenizer and chat template."""

    @property
    def fingerprint(self) -> str:
        """Names tokenizer and template: part of the key under which generated data is cached."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no special tokens added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens skipped."""

    def count(self, user: str, prefix: str = "", *, system: str = "", chat: bool = True) -> int:
        """Tokens of the whole prompt: template around `user`, then `prefix`; without a BOS that the tokenizer adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnv:
    """What a run lends to a task while the task makes its examples."""

    text: TextTools
    seed: int
    data_root: Path | None = None  # a folder with data sets, looked at first
    cache_dir: Path | None = None  # generated data may be kept here, under a hash of everything that shapes it
    window: int | None = None  # prompt + new tokens the model can take


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says once an answer is there. The conversation so far stays as it was, in the model's own words
    unless a `reply` takes their place."""

    question: str
    references: tuple[str, ...]
    prefix: str = ""  # first words of the answer
    reply: str | None = None  # what the answer before this turn is taken to have been; None: what the model said
    max_new_tokens: int | None = None  # None: the example's
    data: Mapping[str, Any] = field(default_factory=dict)  # on top of the example's


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt and what a right answer holds. The user turn is `context + question`, nothing between.

    `protocol=context` seals the KV cache after `context`; `protocol=prompt` after everything. Examples with the same
    context are several questions on it, and `questions=shared` prefills it once. `further` makes a conversation of an
    example; its score is the mean over its turns.
    """

    id: str  # unique within the task, stable between runs
    group: str  # scores are averaged within a group first: "niah_single_1/4096", "qasper"
    context: str  # the long part
    question: str = ""  # what follows it in the same turn
    prefix: str = ""  # first words of the answer, put after the assistant header
    reply: str | None = None  # of a further turn, as there
    system: str = ""
    references: tuple[str, ...]
    max_new_tokens: int
    min_new_tokens: int = 0  # no token that ends an answer is picked before
    teacher_forced: bool = False  # feed the one reference, whatever the model says; its mean NLL (nats) is the output
    chat: bool = True  # wrap in the chat template (LongBench: not for few-shot and code)
    stop: tuple[str, ...] = ()
    max_prompt_tokens: int | None = None  # beyond so many, cut in the middle (LongBench's rule), before wrapping
    data: Mapping[str, Any] = field(default_factory=dict)  # what score and plots need: depth, length, all_classes ...
    further: tuple[Turn, ...] = ()  # user turns behind the first
    unit: str | None = None  # examples of one unit are not independent (one haystack): statistics count them as one

    @property
    def turns(self) -> tuple[Example, ...]:
        """Each user turn as an example by itself: what its answer is scored by."""
        first = replace(self, further=()) if self.further else self
        return (first, *(self._as_example(turn, number) for number, turn in enumerate(self.further, start=2)))

    def _as_example(self, turn: Turn, number: int) -> Example:
        return replace(
            self,
            id=f"{self.id}/turn {number}",
            context="",
            question=turn.question,
            prefix=turn.prefix,
            reply=turn.reply,
            system="",
            references=turn.references,
            max_new_tokens=turn.max_new_tokens or self.max_new_tokens,
            max_prompt_tokens=None,
            data={**self.data, **turn.data},
            further=(),
        )


@dataclass(frozen=True, slots=True)
class Score:
    """`value` in [0, 1] is the task's main number; `details` are further readings of the same output."""

    value: float
    details: Mapping[str, float | str] = field(default_factory=dict)


# What names of `Task.averages` do not say. Not in the tasks' modules: a word changed there would re-run results.
AVERAGES = {
    "leading_digits_share": "of the numbers asked for, the share of digits that came out before the first wrong one",
    "weighted_rising": "mean over lengths with weights 1, 2, ... from the shortest to the longest",
    "weighted_falling": "the same from the longest to the shortest",
    "effective_length": "the longest prompts, in tokens, that score above RULER's threshold",
    "avg_leaderboard": "LongBench's leaderboard: mean over its six categories",
    "perplexity": "of all windows or replies together",
}


class Task(ABC):
    """Subclasses are frozen dataclasses; their defaults are the values of their yaml, which lists every field."""

    version: ClassVar[str]  # goes up when prompts or scores change; old runs are then not resumed
    metric: ClassVar[str]  # the name of the main number, as the field calls it
    seeded: ClassVar[bool] = True  # False: the same examples whatever the seed
    chance: ClassVar[float | None] = 0.0  # what guessing scores; None where scores are small by nature

    def require(self, data_root: Path | None) -> None:  # noqa: B027 (most tasks make their own text)
        """Raise `TaskError` where data are missing: asked before a model is looked at, which takes longer."""

    @property
    def fills(self) -> int | None:
        """Tokens of the window that its conversations are made to outgrow (`overflow.window`); None: of none."""
        return None

    @abstractmethod
    def examples(self, env: TaskEnv) -> Iterator[Example]:
        """All examples in a fixed order; raises `TaskError` where data or arguments cannot serve."""

    @abstractmethod
    def score(self, example: Example, output: str) -> Score:
        """Pure: the same arguments give the same score. Of a conversation, each turn by itself (`Example.turns`)."""

    def averages(self, groups: Mapping[str, float], details: Mapping[str, float] | None = None) -> dict[str, float]:
        """Named averages; `mean`, the plain mean over `groups` (their means), is always there.

        `details`: the means over examples of what `Score.details` holds as numbers.
        """
        return {"mean": sum(groups.values()) / len(groups)} if groups else {}

    def provenance(self) -> dict[str, Any]:
        """What the record must say of the data: source, revision, content hash. Filled once `examples` ran."""
        return {}
