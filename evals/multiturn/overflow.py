"""A task that asks questions after an overflow: the first turn of a conversation fills the window,
and the second overflows it, so that the oldest tokens have to leave.

CachedAttention (ATC 2024, section 4.3.5) feeds a long text to force a truncation, then asks a
benchmark's questions. Here they are about facts (ShadowKV's needles) at the end of that text, in
the part that stays. The first question still fits, so scores by turn separate it from the questions
after the overflow."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evals import haystack as texts
from evals.base import Example, Score, Task, TaskEnv, TaskError, Turn
from evals.needles import CITIES, NEEDLES, Planted
from evals.niah import boundary, filler

SPARE = 4  # by which pieces may grow when they are tokenised apart


@dataclass(frozen=True, kw_only=True)
class NeedlesBehindOverflow(Task):
    """Make conversations whose first turn fills the window, so that the questions after it overflow
    it. `window`: tokens of the text, the first question and its answer together; the run's
    `overflow.window` should be the same. The needles (facts asked for) stand among the last `facts`
    tokens of the text."""

    version = "1"
    metric = "needle found"
    averaged = ("leading_digits_share",)

    window: int = 2048
    facts: int = 512
    questions: int = 4
    conversations: int = 20
    haystack: str = "auto"
    template: str = "{question} Answer with the number alone."
    max_new_tokens: int = 24

    def __post_init__(self) -> None:
        if len(CITIES) < self.questions:
            raise TaskError(
                f"task.questions={self.questions} is too many: there are {len(CITIES)} needles."
            )
        if min(self.facts, self.conversations, self.max_new_tokens) < 1 or self.questions < 2:
            raise TaskError(
                "task.facts, conversations, max_new_tokens must be at least 1, and task.questions 2."
            )
        if "{question}" not in self.template:
            raise TaskError("task.template must hold {question}.")

    @property
    def fills(self) -> int:
        return self.window

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        if env.window is not None and self.window > env.window:
            raise TaskError(
                f"task.window={self.window} exceeds the model's {env.window} tokens: choose a smaller one"
            )
        text = texts.load(self.haystack, env)
        self._opened.update(origin=f"text of {text.name}", sha256=text.sha256)
        tokens = filler(text, 8 * self.window, env)
        for number in range(self.conversations):
            rng = random.Random(f"{env.seed}/{number}")
            start = rng.randrange(max(1, len(tokens) - self.window))
            yield self._conversation(env, tokens[start:], _planted(rng, self.questions), number)

    def _conversation(
        self, env: TaskEnv, tokens: Sequence[int], planted: Sequence[Planted], number: int
    ) -> Example:
        asked = [self.template.replace("{question}", one.question) for one in planted]
        needles = [env.text.encode(one.text) for one in planted]
        frame = env.text.count("\n\n" + asked[0]) + self.max_new_tokens + SPARE
        room = self.window - frame - sum(map(len, needles))
        if room < self.facts:
            enough = self.window + self.facts - room
            raise TaskError(
                f"task.window={self.window} leaves {max(0, room)} tokens of text beside questions and needles, fewer "
                f"than task.facts={self.facts}: raise task.window to {enough + -enough % 64}, or lower task.facts."
            )
        hay = self._with_needles(env, list(tokens[:room]), needles)
        turns = [
            Turn(question, one.answers, data={"turn": turn})
            for turn, (one, question) in enumerate(zip(planted, asked, strict=True), start=1)
        ]
        return Example(
            id=f"overflow-{number}",
            group="overflow",
            context=env.text.decode(hay),
            question=f"\n\n{turns[0].question}",
            references=turns[0].references,
            max_new_tokens=self.max_new_tokens,
            data=turns[0].data,
            further=tuple(turns[1:]),
        )

    def _with_needles(
        self, env: TaskEnv, hay: list[int], needles: Sequence[Sequence[int]]
    ) -> list[int]:
        """Insert the needles, token ids, evenly over the last `facts` tokens of `hay`, each after a
        sentence."""
        first, share = len(hay) - self.facts, self.facts / len(needles)
        places = [
            max(first, boundary(hay, first + int(share * (number + 0.5)), env))
            for number in range(len(needles))
        ]
        for place, needle in reversed([*zip(places, needles, strict=True)]):
            hay[place:place] = needle
        return hay

    def score(self, example: Example, output: str) -> Score:
        return NEEDLES["magic_city"].score(example.references, output)


def _planted(rng: random.Random, count: int) -> list[Planted]:
    """Draw `count` needles (facts with their questions), all about different cities."""
    found: dict[str, Planted] = {}
    while len(found) < count:
        city_needle = NEEDLES["magic_city"].plant(rng)
        found[city_needle.topic] = city_needle
    return list(found.values())
