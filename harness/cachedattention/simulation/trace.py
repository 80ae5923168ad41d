"""Conversations as numbers, drawn or from a file: when they begin, and how long questions and answers are.

The stand-in for ShareGPT has turns and tokens by the law of `evals/multiturn/length_distribution.py`, as
`task=multiturn` has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from evals.data import Content, Row, rows_of
from evals.multiturn import length_distribution
from evals.shapes import ANY, Shape

CHARACTERS_PER_TOKEN = 4.0


@dataclass(frozen=True, slots=True)
class TurnLengths:
    question: int  # tokens
    answer: int

    def within(self, window: int) -> TurnLengths:
        """Return the lengths cut to a window: the question to half of it, the answer to what is left."""
        question = min(self.question, window // 2)
        return TurnLengths(question, min(self.answer, window - question))


@dataclass(frozen=True, slots=True)
class TracedConversation:
    """A conversation with its times. `think_s`: seconds from an answer to the next question, one less than turns."""

    name: str
    start_s: float
    turns: tuple[TurnLengths, ...]
    think_s: tuple[float, ...]


class TraceError(ValueError):
    """Raised where no trace can be made; the message says what to change."""


@lru_cache(maxsize=4)
def drawn(
    sessions: int, rate: float, *, seed: int = 0, think_s: float, question_share: float, correlation: float
) -> list[TracedConversation]:
    """Draw a trace. `rate`: new sessions per second, a Poisson process. `think_s`: mean of an exponential law.
    `question_share`: share of a turn's tokens. `correlation`: of the normal variables from which numbers of turns and
    of tokens are drawn, since sessions of more turns have more tokens."""
    rng = np.random.default_rng(seed)
    lengths = length_distribution.drawn(sessions, rng, correlation=correlation)
    turns = [
        [TurnLengths(*length_distribution.parted(tokens, question_share)) for tokens in session] for session in lengths
    ]
    return timed([str(number) for number in range(sessions)], turns, rate, think_s, rng)


@lru_cache(maxsize=4)
def read(path: Path, sessions: int, rate: float, *, seed: int = 0, think_s: float) -> list[TracedConversation]:
    """Draw a trace from a file in ShareGPT's layout, a list of {id, conversations: [{from, value}]}: conversations in
    random order, each at most once. Tokens are counted as 4 characters each."""
    rng = np.random.default_rng(seed)
    rows = rows_in(path, "data", length_distribution.SHAREGPT)
    found = {str(number if row.get("id") is None else row["id"]): _lengths(row) for number, row in enumerate(rows, 1)}
    named = {name: turns for name, turns in found.items() if turns}
    if len(named) < sessions:
        raise TraceError(f"{path} holds {len(named)} conversations with answers: ask for at most sessions={len(named)}")
    chosen = [list(named)[place] for place in rng.permutation(len(named))[:sessions]]
    return timed(chosen, [named[name] for name in chosen], rate, think_s, rng)


def rows_in(path: Path, key: str, shape: Shape = ANY) -> list[Row]:
    """Return the rows of a file that a user has named as `key`."""
    try:
        content = Content(path.read_bytes(), str(path), sha256="")
    except OSError as error:
        raise TraceError(f"cannot read {key}={path}: {error.strerror}") from error
    return rows_of(content, key, shape).rows


def statistics(trace: Sequence[TracedConversation]) -> dict[str, float]:
    """Return the statistics by which a stand-in for a trace is judged."""
    return length_distribution.statistics([[(turn.question, turn.answer) for turn in one.turns] for one in trace])


def cuts(trace: Sequence[TracedConversation], window: int) -> dict[str, float]:
    """Return what a window takes from single turns, before any history is cut: shares of turns and tokens."""
    turns = [turn for one in trace for turn in one.turns]
    kept = [turn.within(window) for turn in turns]
    return {
        "window": window,
        "cut_turns": sum(old != new for old, new in zip(turns, kept, strict=True)) / len(turns),
        "lost_question_tokens": 1 - sum(turn.question for turn in kept) / sum(turn.question for turn in turns),
        "lost_answer_tokens": 1 - sum(turn.answer for turn in kept) / sum(turn.answer for turn in turns),
    }


def timed(
    names: Sequence[str], turns: Sequence[Sequence[TurnLengths]], rate: float, think_s: float, rng: np.random.Generator
) -> list[TracedConversation]:
    """Give conversations times as in `drawn`; the rate stretches the arrivals, and changes nothing else."""
    starts = np.cumsum(rng.exponential(1 / rate, len(names)))
    return [
        TracedConversation(name, float(start), tuple(own), tuple(rng.exponential(think_s, len(own) - 1).tolist()))
        for name, start, own in zip(names, starts, turns, strict=True)
    ]


def _lengths(row: Mapping[str, Any]) -> list[TurnLengths]:
    return [
        TurnLengths(_count(asked), _count(answer))
        for asked, answer in length_distribution.exchanges(row["conversations"])
    ]


def _count(text: str) -> int:
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN))
