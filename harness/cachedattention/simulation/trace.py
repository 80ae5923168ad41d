"""A trace: conversations as numbers, which say when they begin, how long questions and answers are,
and how long users think in between.

The stand-in for ShareGPT has turns and tokens by the law of
`evals/multiturn/length_distribution.py`, as `task=multiturn` has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from evals.multiturn import length_distribution


@dataclass(frozen=True, slots=True)
class TurnLengths:
    question: int  # tokens
    answer: int

    def within(self, window: int) -> TurnLengths:
        """Return the lengths cut to a window: the question to half of it, the answer to what the
        question leaves."""
        question = min(self.question, window // 2)
        return TurnLengths(question, min(self.answer, window - question))


@dataclass(frozen=True, slots=True)
class TracedConversation:
    """A conversation as lengths and times, without text. `think_s`: seconds from each answer to the
    next question, one fewer than there are turns."""

    name: str
    start_s: float
    turns: tuple[TurnLengths, ...]
    think_s: tuple[float, ...]


@lru_cache(maxsize=4)
def drawn(
    sessions: int,
    rate: float,
    *,
    seed: int = 0,
    think_s: float,
    question_share: float,
    correlation: float,
) -> list[TracedConversation]:
    """Draw so many conversations. `rate`: new ones per second, a Poisson process. `think_s`: mean
    seconds from an answer to the next question, an exponential law. `question_share`: the
    question's share of a turn's tokens. `correlation`: that of the two normal variables from which
    the numbers of turns and of tokens are made, because conversations of more turns have more
    tokens."""
    rng = np.random.default_rng(seed)
    lengths = length_distribution.drawn(sessions, rng, correlation=correlation)
    turns = [
        [TurnLengths(*length_distribution.parted(tokens, question_share)) for tokens in session]
        for session in lengths
    ]
    return timed([str(number) for number in range(sessions)], turns, rate, think_s, rng)


def statistics(trace: Sequence[TracedConversation]) -> dict[str, float]:
    """Return the statistics (turns and tokens of conversations) by which a drawn trace is compared
    with a real one."""
    return length_distribution.statistics(
        [[(turn.question, turn.answer) for turn in talk.turns] for talk in trace]
    )


def timed(
    names: Sequence[str],
    turns: Sequence[Sequence[TurnLengths]],
    rate: float,
    think_s: float,
    rng: np.random.Generator,
) -> list[TracedConversation]:
    """Give conversations of known lengths their times, drawn as `drawn` says. Another rate scales
    the times of arrival, and changes nothing else."""
    starts = np.cumsum(rng.exponential(1 / rate, len(names)))
    return [
        TracedConversation(
            name, float(start), tuple(own), tuple(rng.exponential(think_s, len(own) - 1).tolist())
        )
        for name, start, own in zip(names, starts, turns, strict=True)
    ]
