"""A task that asks about facts in conversations of several turns: a fact is stated in one turn, and
asked for in the same or a later one.

Lengths are those of ShareGPT as CachedAttention publishes them (arXiv:2403.19708), scaled to the
model's window, and texts are cut from essays; or both come from a file. When turns arrive is no
concern of a task: see harness/cachedattention/serving/."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from evals import haystack as haystacks
from evals.base import Example, Score, Task, TaskEnv, TaskError
from evals.data import open_content, require
from evals.multiturn import length_distribution
from evals.multiturn.building import REPLIES, Builder
from evals.multiturn.texts import Passages, Script, located, told
from evals.needles import NEEDLES
from evals.perplexity import likelihood, perplexity

ABOUT = ("any", "first")
SPARE_TOKENS = 8  # for a BOS, and for what pieces may grow by when they are tokenised apart


@dataclass(frozen=True, kw_only=True)
class Multiturn(Task):
    """Make conversations that state facts and ask for them later. `replies` says what stands in the
    conversation as the answers: `own`, the model's words; `given`, the text's own, once an answer
    is scored; `forced`, the text's own fed token by token, where nothing is asked and their
    likelihood is scored."""

    version = "1"
    averaged = ("leading_digits_share",)

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

    def __post_init__(self) -> None:
        for name, known in (("replies", REPLIES), ("about", ABOUT), ("haystack", haystacks.NAMES)):
            if getattr(self, name) not in known:
                raise TaskError(
                    f"task.{name}={getattr(self, name)!r} is unknown: choose one of {', '.join(known)}."
                )
        self._refuse_below(
            "must be at least {}.",
            **dict.fromkeys(("conversations", "turns", "longest", "opening", "max_new_tokens"), 1),
        )
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
        builder = Builder(
            env, limit, self.turns, self.replies, self.about, self.template, self.max_new_tokens
        )
        made, longest = 0, 0
        for number, script in enumerate(self._scripts(env, limit)):
            longest = max(longest, len(script))
            talk = builder.conversation(script, f"{env.seed}/{number}")
            if talk is not None:
                made += 1
                yield talk
            if made == self.conversations:
                break
        if (
            builder.lengths
        ):  # a reply in the model's own words counts with the most that it may have
            self._opened["statistics"] = length_distribution.statistics(
                builder.lengths, self._opened.get("scale", 1.0)
            )
        if made < self.conversations:
            origin = str(self._opened["origin"]).removeprefix("local:")
            kind = "" if self.turns is None else f" of {self.turns} turns"
            raise TaskError(
                f"{origin} gives {made} conversations{kind} that fit into {limit} tokens, fewer than "
                f"task.conversations={self.conversations}, and the longest has {longest} turns: lower "
                "task.conversations, task.turns or task.opening, or raise task.longest."
            )

    def score(self, example: Example, output: str) -> Score:
        if not example.teacher_forced:
            return NEEDLES["magic_city"].score(example.references, output)
        return likelihood(example, output)

    def averages(
        self, groups: Mapping[str, float], details: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Return the means of the scores by group and over all. With forced replies also
        `perplexity`, from the mean negative log-likelihood, in which every conversation counts
        alike."""
        return super().averages(groups, details) | perplexity(details)

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
            source, root = located(self.source, env.data_root)
            content = open_content(source, replace(env, data_root=root))
            self._opened.update(content.provenance)
            return told(content, env)
        return self._drawn(env, limit)

    def _drawn(self, env: TaskEnv, limit: int) -> Iterator[Script]:
        text, scale = haystacks.load(self.haystack, env), limit / length_distribution.MOST_TOKENS
        self._opened.update(origin=f"text of {text.name}", sha256=text.sha256, scale=scale)
        rng = np.random.default_rng(env.seed)
        sentences = list(filter(str.strip, haystacks.split_sentences(text.text)))
        sessions = length_distribution.drawn(
            self.conversations, rng, correlation=self.correlation, scale=scale, turns=self.turns
        )
        for number, tokens in enumerate(sessions):
            parts = [length_distribution.parted(one, self.question_share) for one in tokens]
            start = int(rng.integers(len(sentences)))
            yield Passages(f"{number}", sentences, env, start, parts, self.opening)
