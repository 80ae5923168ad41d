"""A task that asks about facts in conversations of several turns: a fact is stated in one turn, and
asked for in the same or a later one.

Lengths are those of ShareGPT as CachedAttention publishes them (arXiv:2403.19708), scaled to the
model's window, and texts are cut from essays; or both come from a file. When turns arrive is no
concern of a task: see harness/cachedattention/serving/."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from evals import haystack as haystacks
from evals.base import Example, Score, Task, TaskEnv, TaskError
from evals.data import require
from evals.multiturn import length_distribution
from evals.multiturn.building import REPLIES, Builder
from evals.multiturn.texts import Passages, Reader, Script, located, opened, told
from evals.needles import NEEDLES, scored_digits

ABOUT = ("any", "first")
SPARE_TOKENS = 8  # for a BOS, and for what pieces may grow by when they are tokenised apart


@dataclass(frozen=True, kw_only=True)
class Multiturn(Task):
    """Make conversations that state facts and ask for them later. `replies` says what stands in the
    conversation as the answers: `own`, the model's words; `given`, the text's own, once an answer
    is scored; `forced`, the text's own fed token by token, where nothing is asked and their
    likelihood is scored."""

    version: ClassVar[str] = "1"

    source: str | None = None
    conversations: int = 20
    turns: int | None = None
    longest: int | None = None
    replies: str = "own"
    about: str = "any"
    opening: int = 256
    question_share: float = length_distribution.QUESTION_SHARE
    correlation: float = 0.0
    haystack: str = "auto"
    template: str = "{text}\n\n{question} Answer with the number alone."
    max_new_tokens: int = 24
    _made: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, known in (("replies", REPLIES), ("about", ABOUT), ("haystack", haystacks.NAMES)):
            if getattr(self, name) not in known:
                raise TaskError(
                    f"task.{name}={getattr(self, name)!r} is unknown: choose one of {', '.join(known)}."
                )
        for name in ("conversations", "turns", "longest", "opening", "max_new_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise TaskError(f"task.{name}={value} must be at least 1.")
        if self.turns is not None and self.turns > length_distribution.MOST_TURNS:
            raise TaskError(
                f"task.turns={self.turns} is too many: conversations have at most {length_distribution.MOST_TURNS}."
            )
        if not 0 < self.question_share < 1 or not -1 < self.correlation < 1:
            raise TaskError(
                "task.question_share must lie between 0 and 1, task.correlation between -1 and 1."
            )
        if any(part not in self.template for part in ("{text}", "{question}")):
            raise TaskError("task.template must hold {text} and {question}.")

    @property
    def metric(self) -> str:  # type: ignore[override]
        return "perplexity" if self.replies == "forced" else "needle found"

    @property
    def chance(self) -> float | None:  # type: ignore[override]
        return None if self.replies == "forced" else 0.0

    def require(self, data_root: Path | None) -> None:
        if self.source is not None:
            source, root = located(self.source, data_root)
            require([source], root)

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        limit = self._limit(env)
        shape = {
            name: getattr(self, name)
            for name in ("turns", "replies", "about", "template", "max_new_tokens")
        }
        builder, made, longest = Builder(env, limit, **shape), 0, 0
        for number, script in enumerate(self._scripts(env, limit)):
            longest = max(longest, len(script))
            talk = builder.conversation(script, f"{env.seed}/{number}")
            if talk is not None:
                made += 1
                yield talk
            if made == self.conversations:
                break
        if builder.lengths:
            self._made["statistics"] = length_distribution.statistics(
                builder.lengths, self._made.get("scale", 1.0)
            )
        if made < self.conversations:
            origin = str(self._made["origin"]).removeprefix("local:")
            kind = "" if self.turns is None else f" of {self.turns} turns"
            raise TaskError(
                f"{origin} gives {made} conversations{kind} that fit into {limit} tokens, fewer than "
                f"task.conversations={self.conversations}, and the longest has {longest} turns: lower "
                "task.conversations, task.turns or task.opening, or raise task.longest."
            )

    def score(self, example: Example, output: str) -> Score:
        if not example.teacher_forced:
            return NEEDLES["magic_city"].score(example.references, output)
        nll = float(output)
        return Score(math.exp(-nll), {"nll": nll})

    def averages(
        self, groups: Mapping[str, float], details: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Return the means of the scores by group and over all. With forced replies also
        `perplexity`, from the mean negative log-likelihood, in which every conversation counts
        alike."""
        perplexity = (
            {"perplexity": math.exp(details["nll"])} if details and "nll" in details else {}
        )
        return super().averages(groups) | scored_digits(details) | perplexity

    def provenance(self) -> dict[str, Any]:
        """Return where the text is from, and `statistics` of the conversations' lengths. A reply in
        the model's own words counts with the most tokens that it may have."""
        return dict(self._made)

    def _limit(self, env: TaskEnv) -> int:
        """Return the most tokens that a conversation may have, its answers included."""
        if self.longest is not None and env.window is not None and self.longest > env.window:
            raise TaskError(
                f"task.longest={self.longest} exceeds the model's {env.window} tokens: choose fewer."
            )
        return (
            self.longest
            or min(length_distribution.MOST_TOKENS, env.window or length_distribution.MOST_TOKENS)
        ) - SPARE_TOKENS

    def _scripts(self, env: TaskEnv, limit: int) -> Iterator[Script]:
        if self.source is not None:
            content = opened(self.source, env)
            self._made.update(content.provenance)
            return told(content, env)
        return self._drawn(env, limit)

    def _drawn(self, env: TaskEnv, limit: int) -> Iterator[Script]:
        text, scale = haystacks.load(self.haystack, env), limit / length_distribution.MOST_TOKENS
        self._made.update(origin=f"text of {text.name}", sha256=text.sha256, scale=scale)
        rng, reader = np.random.default_rng(env.seed), Reader(text, env)
        sessions = length_distribution.drawn(
            self.conversations, rng, correlation=self.correlation, scale=scale, turns=self.turns
        )
        for number, tokens in enumerate(sessions):
            parts = [length_distribution.parted(one, self.question_share) for one in tokens]
            yield Passages(f"{number}", reader, int(rng.integers(len(reader))), parts, self.opening)
