"""Defines what a task is: examples made of text, and a pure score.

A task is one frozen dataclass with two methods; its fields are its parameters, and
`conf/task/NAME.yaml` lists all of them. It never sees a tokenizer object, a tensor or a model. A
`TaskEnv` hands it what it needs: a `TextTools` to ask for lengths, and a data root to look for
files in."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

# stands in errors where no data root is set; callers that know how to set one say so
NO_DATA_ROOT = "(none is set)"
# for a BOS, and for what pieces may grow by when they are tokenised apart
SPARE_TOKENS = 16


class TaskError(ValueError):
    """Report that a task cannot do what the user asked; the message says why, and what to do
    instead."""


class MissingData(TaskError):
    """Report data files that cannot be found; the message names them and says how to get them."""


class TextTools(Protocol):
    """Give a task what it may know of the model's tokenizer and chat template."""

    @property
    def fingerprint(self) -> str:
        """Return a text that identifies tokenizer and chat template; it is part of the key under
        which generated prompts are cached."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without special tokens."""

    def count(
        self,
        user: str,
        prefix: str = "",
        *,
        system: str = "",
        chat: bool = True,
        earlier: Sequence[str] = (),
    ) -> int:
        """Count the tokens of the whole prompt: the chat template around `earlier` and `user`, then
        `prefix`. A BOS that the tokenizer adds does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnv:
    """Hold what a run gives a task to make its examples with: the tokenizer's tools, the seed, the
    folders of data and caches, and the model's window."""

    text: TextTools
    seed: int
    data_root: Path | None = None  # a folder of data sets, searched before the hub
    # where generated data may be kept, under a hash of everything that shapes them
    cache_dir: Path | None = None
    window: int | None = None  # the tokens that the model can take, prompt and answer together


@dataclass(frozen=True, slots=True)
class Turn:
    """Hold one user turn of a conversation after the first. It follows the answer to the turn
    before, which stands in the conversation in the model's own words, unless `reply` replaces it.
    """

    question: str
    references: tuple[str, ...]
    prefix: str = ""  # the first words of the answer
    reply: str | None = None  # replaces the answer before this turn; None: the model's own words
    max_new_tokens: int | None = None  # None: as many as the example has
    data: Mapping[str, Any] = field(default_factory=dict)  # added to the example's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Hold one prompt and what a right answer contains. The user turn is `context + question`, with
    nothing in between.

    With `protocol=context` the KV cache is sealed (the method then compresses or indexes it) after
    `context`, before the question is known; with `protocol=prompt` after everything. Examples with
    the same context are several questions about it, and `questions=shared` prefills it once. With
    `further` turns an example is a conversation, and its score is the mean over its turns."""

    id: str  # unique within the task, and the same in every run
    group: str  # scores are averaged within a group first: "niah_single_1/4096", "qasper"
    context: str  # the long part
    question: str = ""  # what follows it in the same turn
    prefix: str = ""  # the first words of the answer, put after the assistant header
    reply: str | None = None  # replaces the answer before this turn, as in `Turn`
    system: str = ""
    # what user and assistant said before, in turn, as messages of the chat template
    earlier: tuple[str, ...] = ()
    references: tuple[str, ...]
    max_new_tokens: int
    min_new_tokens: int = 0  # until so many are there, no token that ends an answer is picked
    # feed the one reference, whatever the model says; the output is its mean NLL in nats
    teacher_forced: bool = False
    # fed one by one after the same prompt; the output is what `read_choices` reads
    choices: tuple[str, ...] = ()
    # context and question are tokenised apart, and no template strips the question (kvpress)
    apart: bool = False
    # whether the chat template goes around it (in LongBench not around few-shot and code)
    chat: bool = True
    stop: tuple[str, ...] = ()
    # the question holds a document, which too_long cuts if the context is too short for it
    long_question: bool = False
    # a longer prompt is cut in the middle, before wrapping (LongBench)
    max_prompt_tokens: int | None = None
    # what stays of it is decoded half by half, not as one text (LongBench v1)
    halves_apart: bool = False
    # what score and plots need: depth, length, all_classes ...
    data: Mapping[str, Any] = field(default_factory=dict)
    further: tuple[Turn, ...] = ()  # the user turns after the first
    unit: str | None = None  # examples of one unit, as of one haystack, count as one in statistics

    @property
    def turns(self) -> tuple[Example, ...]:
        """Return each user turn as an example of its own, by which its answer is scored."""
        first = replace(self, further=())
        return (
            first,
            *(self._as_example(turn, number) for number, turn in enumerate(self.further, start=2)),
        )

    def _as_example(self, turn: Turn, number: int) -> Example:
        return replace(
            self,
            id=f"{self.id}/turn {number}",
            context="",
            question=turn.question,
            prefix=turn.prefix,
            reply=turn.reply,
            system="",
            earlier=(),
            references=turn.references,
            max_new_tokens=turn.max_new_tokens or self.max_new_tokens,
            max_prompt_tokens=None,
            data={**self.data, **turn.data},
            further=(),
        )


@dataclass(frozen=True, slots=True)
class Score:
    """Hold the task's main number as `value`, from 0 to 1, and further measures of the same output
    as `details`."""

    value: float
    details: Mapping[str, float | str] = field(default_factory=dict)


class Choice(NamedTuple):
    """Hold the likelihood of one of `Example.choices` under the model."""

    log_likelihood: float  # of all its tokens, in nats
    greedy: bool  # whether the model would have said it by itself


def read_choices(output: str) -> list[Choice]:
    """Parse the output of an example with `choices`, which the harness writes as JSON: the
    likelihood of each choice, in the order of `Example.choices`."""
    return [Choice(*choice) for choice in json.loads(output)]


# Says of `Task.averages` what their names do not. It stands here because a word changed in a task's own module would
# make old runs of that task run again.
AVERAGES = {
    "leading_digits_share": "of the numbers asked for, the share of digits that came out before the first wrong one",
    "weighted_rising": "mean over lengths with weights 1, 2, ... from the shortest to the longest",
    "weighted_falling": "the same from the longest to the shortest",
    "effective_length": "the longest prompts, in tokens, that score above RULER's threshold",
    "avg_leaderboard": "LongBench's leaderboard: mean over its six categories",
    "perplexity": "of all windows or replies together",
    "boxed_share": "share of the outputs that have an answer in a box",
    "prepended_share": "share of the outputs that begin with the string that was asked for",
    "extracted_share": "share of the outputs with a letter in the words that were asked for",
}


class Task(ABC):
    """Make examples and score outputs. Subclasses are frozen dataclasses, and their yaml lists
    every field with its default."""

    version: ClassVar[str]  # raised when prompts or scores change, so that old runs are not resumed
    metric: ClassVar[str]  # what the field calls the main number
    seeded: ClassVar[bool] = True  # False: the examples are the same whatever the seed
    # what guessing scores; None where scores are small by nature
    chance: ClassVar[float | None] = 0.0
    # the numbers of `Score.details` whose means `averages` returns
    averaged: ClassVar[Sequence[str]] = ()

    def require(self, data_root: Path | None) -> None:  # noqa: B027 (most tasks make their own text)
        """Raise `TaskError` if the task's data are neither in `data_root` nor on the hub. It is
        called before the model is loaded, which takes longer."""

    @property
    def fills(self) -> int | None:
        """Return the number of tokens that conversations are made to exceed, for a task that tests
        what happens when a conversation outgrows the window (the run's `overflow.window`); None for
        other tasks."""
        return None

    @abstractmethod
    def examples(self, env: TaskEnv) -> Iterator[Example]:
        """Yield all examples in a fixed order. Raises `TaskError` if data or arguments are
        unusable."""

    @abstractmethod
    def score(self, example: Example, output: str) -> Score:
        """Score one output. It is a pure function: the same arguments give the same score. A
        conversation is scored turn by turn (`Example.turns`)."""

    def averages(
        self, groups: Mapping[str, float], details: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Return averages by name. `mean`, the plain mean over `groups` (group -> mean score), is
        always among them.

        `details`: the means over examples of the numbers in `Score.details`.
        """
        mean = {"mean": sum(groups.values()) / len(groups)} if groups else {}
        of_details = {name: details[name] for name in self.averaged if details and name in details}
        return mean | self.averages_of(groups) | of_details

    def averages_of(self, groups: Mapping[str, float]) -> dict[str, float]:
        """Return averages over a part of the groups by name, beside `mean`; none by default."""
        return {}

    def provenance(self) -> dict[str, Any]:
        """Return what a run records about the data: source, revision, content hash. It is complete
        once `examples` has run, which keeps it in `_opened`."""
        return dict(self._opened)

    @cached_property
    def _opened(self) -> dict[str, Any]:
        return {}

    def _refuse_below(self, says: str, **least: int) -> None:
        """Raise `TaskError` if a parameter is smaller than its least value. Keywords name the
        parameters with their least values; a parameter that is null passes. `says`: what the
        message says of the value, with {} for the least value."""
        for name, low in least.items():
            if (value := getattr(self, name)) is not None and value < low:
                raise TaskError(f"task.{name}={value} {says.format(low)}")


def prompt_limit(env: TaskEnv, asked: int | None, rest: int, says: str) -> int | None:
    """Return how many tokens a prompt may have before the chat template is put around it: `asked`,
    or what the model's window leaves beside `rest` tokens; None for any number. Raises `TaskError`,
    which `says` why, if nothing is left."""
    if asked is not None or env.window is None:
        return asked
    limit = env.window - rest - SPARE_TOKENS
    if limit < 2:
        raise TaskError(says)
    return limit


def each_once(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return a name, or each of several, once and in their order."""
    return tuple(dict.fromkeys([names] if isinstance(names, str) else names))


def by_part(groups: Mapping[str, float], part: int) -> dict[str, list[float]]:
    """Collect the scores of groups whose names, "first/second", have a part in common: the first
    (0) or the second (1). Parts come in order of appearance; a group without a second part is left
    out.

    >>> by_part({"vt/4096": 1.0, "cwe/4096": 0.5, "vt/8192": 0.25}, 1)
    {'4096': [1.0, 0.5], '8192': [0.25]}
    """
    shared: dict[str, list[float]] = {}
    for group, score in groups.items():
        for name in group.split("/")[part : part + 1]:
            shared.setdefault(name, []).append(score)
    return shared
