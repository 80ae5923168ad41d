"""Asks RULER (Hsieh et al. 2024, arXiv:2404.06654): 13 synthetic tasks at any length."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from evals import haystack
from evals.base import Example, Score, Task, TaskEnv, TaskError, Turn, by_part
from evals.data import require
from evals.needles import leading_digits
from evals.ruler import leaderboard, official, qa
from evals.ruler.factory import Factory
from evals.ruler.fitting import SMALLEST, TooShort
from evals.ruler.templates import FAMILIES, NEW_TOKENS, FilledTemplate

# tokens up to which prompts are made at once: that is quick, and only there may a task not fit
EAGER = 4096

THRESHOLD = 0.856  # the score of Llama-2-7B-chat at 4096 tokens

# task, length, and a function that makes the prompts
Group = tuple[str, int, Callable[[], list[FilledTemplate]]]


@dataclass(frozen=True, kw_only=True)
class Ruler(Task):
    """Ask RULER's tasks. From 1024 tokens on, prompts equal those of the official scripts; shorter
    ones come from a finer generator.

    A length counts chat template, prompt, answer prefix and the tokens kept free for the answer.
    The context of an example ends where the template's {context} ends. With a chat template, cwe's
    worked example stays plain here, where the official script wraps it too."""

    version = "1"
    metric = "string_match"
    averaged = ("leading_digits_share",)

    tasks: Sequence[str] = tuple(FAMILIES)
    lengths: Sequence[int] = (4096,)
    samples: int = 10
    questions: int = 1
    conversation: bool = False
    haystack: str = "auto"
    source: str | None = None

    def __post_init__(self) -> None:
        for name in ("tasks", "lengths"):
            values = getattr(self, name)
            if isinstance(values, str | int) or not values or len(set(values)) < len(values):
                raise ValueError(
                    f"{name}={values!r} must be a list of distinct entries, as in task.{name}=[...]"
                )
        unknown = [task for task in self.tasks if task not in FAMILIES]
        if unknown:
            raise ValueError(
                f"tasks: {', '.join(unknown)} unknown; RULER has {', '.join(FAMILIES)}"
            )
        if any(length < 1 for length in self.lengths):
            raise ValueError(f"lengths={list(self.lengths)} must be positive numbers of tokens")
        self._refuse_below("must be {} or more", samples=1, questions=1)
        self._check_questions()
        if self.haystack not in haystack.NAMES:
            raise ValueError(
                f"haystack={self.haystack!r} is unknown: choose one of {', '.join(haystack.NAMES)}"
            )

        if self.source is not None and not self.source.strip():
            raise TaskError(
                f"task.source is empty: name a folder of the official scripts, {leaderboard.REPO}, or neither"
            )

    def _check_questions(self) -> None:
        if self.questions == 1:
            if self.conversation:
                raise TaskError(
                    "task.conversation=true asks several questions in turn: set task.questions=2 or more"
                )
            return
        if self.source is not None:
            raise TaskError(
                f"task.source={self.source} has one question per prompt: set task.questions=1"
            )
        if others := [task for task in self.tasks if FAMILIES[task] != "niah"]:
            raise TaskError(
                f"task.questions={self.questions} hides more needles in a haystack, which {', '.join(others)} do not "
                "have: name tasks of niah_... in task.tasks"
            )

    def require(self, data_root: Path | None) -> None:
        if self.source == leaderboard.REPO:
            require([leaderboard.file_of(length) for length in self.lengths], data_root)
        if self.source is None:
            require([qa.SOURCES[task] for task in self.tasks if FAMILIES[task] == "qa"], data_root)

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        """Yield examples by length, then by task, then by sample. Missing data and lengths too
        short are refused before the first one."""
        if self.source == leaderboard.REPO:
            return self._examples(self._of_leaderboard(env))
        if self.source is not None:
            files = official.find(Path(self.source).expanduser(), self.tasks, self.lengths)
            return self._examples(
                [
                    (task, length, partial(official.prompts, path, task, self.samples))
                    for path, task, length in files
                ]
            )
        self._check(env)
        factory = Factory(env, self.tasks, self.haystack, self.questions)
        self._opened.update(factory.provenance())
        groups, unfit = list[Group](), list[str]()
        for length, task in product(self.lengths, self.tasks):
            make = partial(factory.prompts, task, length, self.samples)
            if length <= EAGER:
                try:
                    make = partial(list, make())
                except TooShort as error:
                    unfit.append(str(error))
            groups.append((task, length, make))
        if unfit:
            raise TaskError(
                f"{', '.join(unfit)}: raise task.lengths, or leave them out of task.tasks"
            )
        return self._examples(groups)

    def score(self, example: Example, output: str) -> Score:
        family = FAMILIES[example.data["task"]]
        text = clean(output, "" if self.source == leaderboard.REPO else "\n")
        digits = leading_digits(example.references, text) if family == "niah" else {}
        found = [reference.lower() in text.lower() for reference in example.references]
        # RULER's string_match_part for questions with several spellings of the answer, else _all
        share = float(any(found)) if family == "qa" else sum(found) / len(found)
        return Score(share, {"null": float(not text), **digits})

    def averages_of(self, groups: Mapping[str, float]) -> dict[str, float]:
        """Return the means of lengths and of tasks, and RULER's summaries over lengths where they are
        defined."""
        averages = means(groups, part=1) | means(groups, part=0)
        by_length = {int(length): score for length, score in means(groups, part=1).items()}
        if len(by_length) > 1:
            averages["weighted_rising"], averages["weighted_falling"] = weighted_averages(by_length)
        if groups and len(groups) == len(FAMILIES) * len(by_length):
            averages["effective_length"] = effective_length(by_length)
        return averages

    def _check(self, env: TaskEnv) -> None:
        shortest, longest = min(self.lengths), max(self.lengths)
        if shortest < SMALLEST:
            raise TaskError(
                f"RULER starts at {SMALLEST} tokens: raise task.lengths={list(self.lengths)}"
            )
        if not 0 <= env.seed < 2**32:
            raise TaskError(f"seed={env.seed} must be in 0..{2**32 - 1} for RULER")
        if env.window is not None and longest > env.window:
            raise TaskError(
                f"task.lengths has {longest}, the model takes {env.window} tokens: use lengths up to that"
            )

    def _of_leaderboard(self, env: TaskEnv) -> Iterator[Group]:
        for length in self.lengths:
            for task, prompts, origin in leaderboard.prompts(env, self.tasks, length, self.samples):
                self._opened[f"{leaderboard.REPO}/{length}"] = origin
                yield task, length, partial(list, prompts)

    def _examples(self, groups: Iterable[Group]) -> Iterator[Example]:
        for task, length, make in groups:
            digest = hashlib.sha256()
            for index, prompt in enumerate(make()):
                asked = list[Example]()
                for one in prompt.questions:
                    digest.update("\0".join((one.text, *one.references, "")).encode())
                    example = Example(
                        id=f"{task}/{length}/{index}",
                        group=f"{task}/{length}",
                        context=one.context,
                        question=one.question,
                        prefix=one.prefix,
                        references=one.references,
                        max_new_tokens=one.new_tokens or NEW_TOKENS[FAMILIES[task]],
                        apart=one.apart,
                        data={"task": task, "length": length, "index": index, **one.data},
                    )
                    asked.append(example)
                yield from self._asked(asked)
            self._opened.setdefault("sha256", {})[f"{task}/{length}"] = digest.hexdigest()

    def _asked(self, questions: Sequence[Example]) -> Iterator[Example]:
        """Yield the questions on one haystack: each as an example of its own, or all as the turns
        of one conversation."""
        first, *rest = questions
        if self.conversation:
            said = (Turn(one.question, one.references, one.prefix, data=one.data) for one in rest)
            yield replace(first, further=tuple(said))
        else:
            for number, one in enumerate(questions):
                yield replace(one, id=f"{one.id}.{number}", unit=one.id) if rest else one


def clean(output: str, control: str = "\n") -> str:
    """Strip an output and turn control characters in it into newlines, as RULER's scorer does, or
    into `control`: kvpress's scorer leaves them out.

    >>> clean(" 12\\t34 ")
    '12\\n34'
    """
    return re.sub(r"[\x00-\x1f]", control, output.strip()).strip()


def means(groups: Mapping[str, float], part: int) -> dict[str, float]:
    """Average the groups "task/length" that share a task (`part=0`) or a length (`part=1`), in
    order of appearance.

    >>> means({"vt/4096": 1.0, "cwe/4096": 0.5, "vt/8192": 0.25}, part=1)
    {'4096': 0.75, '8192': 0.25}
    """
    return {name: sum(scores) / len(scores) for name, scores in by_part(groups, part).items()}


def effective_length(by_length: Mapping[int, float]) -> int:
    """Return the largest length whose score exceeds THRESHOLD, 0 if none does.

    >>> effective_length({4096: 0.95, 8192: 0.86, 16384: 0.7})
    8192
    """
    return max((length for length, score in by_length.items() if score > THRESHOLD), default=0)


def weighted_averages(by_length: Mapping[int, float]) -> tuple[float, float]:
    """Average over lengths with weights 1, 2, ... from the shortest to the longest, and the other
    way round.

    >>> weighted_averages({4096: 0.75, 8192: 0.0})
    (0.25, 0.5)
    """
    scores = [by_length[length] for length in sorted(by_length)]
    weights = range(1, len(scores) + 1)
    rising, falling = (
        sum(weight * score for weight, score in zip(weights, ordered, strict=True)) / sum(weights)
        for ordered in (scores, reversed(scores))
    )
    return rising, falling
