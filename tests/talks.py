"""Conversations for tests of what runs over turns: random tokens of tests/tiny.py's models, or a task's text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from evals.base import Example, Score, Task, TaskEnv, Turn
from harness.cachedattention.serving.plan import Session
from harness.jobs.examples import PreparedExample
from harness.prompts.prompt import Prompt
from tests.tiny import prompt


def session(
    name: str, start_s: float, *turns: tuple[int, int], think_s: Sequence[float] = (), seed: int = 0
) -> Session:
    """`turns`: tokens of the question, and of the answer."""
    return Session(item(name, *turns, seed=seed), start_s, tuple(think_s) or (5.0,) * (len(turns) - 1))


def item(name: str, *turns: tuple[int, int], seed: int = 0) -> PreparedExample:
    further = tuple(Turn(f"{name} asks again", (), max_new_tokens=answer) for _, answer in turns[1:])
    example = Example(
        id=name, group="talk", context=f"{name} asks", references=(), max_new_tokens=turns[0][1], further=further
    )
    first, *later = (
        PreparedExample(one, _prompt(question, 100 * seed + place), answer, ())
        for place, (one, (question, answer)) in enumerate(zip(example.turns, turns, strict=True))
    )
    return PreparedExample(example, first.prompt, first.new_tokens, (), further=tuple(later))


def _prompt(tokens: int, seed: int) -> Prompt:
    ids = tuple(prompt(tokens, seed=seed)[0].tolist())
    return Prompt(ids, tokens, 0, 0, False, "")


@dataclass(frozen=True, kw_only=True)
class Talks(Task):
    """Conversations about nothing, of one to three turns."""

    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "length"

    conversations: int = 4
    max_new_tokens: int = 3

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        for place in range(self.conversations):
            further = tuple(Turn(f"And {number}?", ()) for number in range(place % 3))
            yield Example(
                id=f"talk {place}", group="talk", context=f"Say {place} things.", references=(),
                max_new_tokens=self.max_new_tokens, further=further,
            )  # fmt: skip

    def score(self, example: Example, output: str) -> Score:
        return Score(min(1.0, len(output) / 100))


def configured(folder: Path) -> Path:
    """A folder for --config-dir, in which task=talks is that."""
    (folder / "task").mkdir(parents=True)
    (folder / "task" / "talks.yaml").write_text(
        "_target_: tests.talks.Talks\nconversations: 4  # how many\nmax_new_tokens: 3  # of each answer\n"
    )
    return folder
