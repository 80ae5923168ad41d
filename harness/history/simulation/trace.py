"""Conversations as numbers: when they begin, how long each turn's question and answer are. Drawn, or from a file.

The stand-in for ShareGPT follows what CachedAttention publishes of it (sections 2.3, 2.4 and 4.2): 27 % of the
conversations have one turn, 5.75 turns on average, at most 40; 47 % hold more than 2K tokens, 30 % more than 4K.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

ONE_TURN, MEAN_TURNS, MOST_TURNS = 0.27, 5.75, 40
OVER = {2048: 0.47, 4096: 0.30}  # tokens of a session -> share of sessions that hold more
MOST_TOKENS = 32_768
EVENNESS = 2.0  # of a session's turns: shape of the gamma law their lengths are drawn from
CHARACTERS_PER_TOKEN = 4.0


@dataclass(frozen=True, slots=True)
class Turn:
    question: int  # tokens
    answer: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """`think_s`: from an answer to the next question, one less than there are turns."""

    name: str
    start_s: float
    turns: tuple[Turn, ...]
    think_s: tuple[float, ...]


class TraceError(ValueError):
    """No trace can be made of this; the message says what to change."""


def drawn(
    sessions: int, rate: float, *, seed: int = 0, think_s: float, question_share: float, correlation: float
) -> list[Conversation]:
    """`rate`: new sessions per second, a Poisson process. `think_s`: mean of an exponential law. `question_share`: of a
    turn's tokens. `correlation`: of the normal variables behind turns and tokens, as more turns have more tokens."""
    rng = np.random.default_rng(seed)
    first = rng.standard_normal(sessions)
    second = correlation * first + np.sqrt(1 - correlation**2) * rng.standard_normal(sessions)
    counts, totals = _turns(norm.cdf(first)), _tokens(second)
    parts = [_split(int(total), int(count), rng) for total, count in zip(totals, counts, strict=True)]
    turns = [[_turn(part, question_share) for part in session] for session in parts]
    return timed([str(number) for number in range(sessions)], turns, rate, think_s, rng)


def read(path: Path, sessions: int, rate: float, *, seed: int = 0, think_s: float) -> list[Conversation]:
    """Of a file in ShareGPT's layout, a list of {id, conversations: [{from, value}]}: conversations drawn in random
    order, all at most once. Tokens are counted as 4 characters each."""
    rng = np.random.default_rng(seed)
    try:
        found = [(str(one["id"]), _exchanges(one["conversations"])) for one in json.loads(path.read_text("utf-8"))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"cannot read {path} as ShareGPT, a list of {{id, conversations: [{{from, value}}]}}: {error!r}"
        ) from error
    named = {name: turns for name, turns in found if turns}
    if len(named) < sessions:
        raise TraceError(f"{path} holds {len(named)} conversations with answers: ask for at most sessions={len(named)}")
    chosen = [list(named)[place] for place in rng.permutation(len(named))[:sessions]]
    return timed(chosen, [named[name] for name in chosen], rate, think_s, rng)


def statistics(trace: Sequence[Conversation]) -> dict[str, float]:
    """What a stand-in has to be judged by."""
    counts = np.array([len(one.turns) for one in trace])
    totals = np.array([sum(turn.question + turn.answer for turn in one.turns) for one in trace])
    questions = sum(turn.question for one in trace for turn in one.turns)
    return {
        "sessions": len(trace),
        "turns": int(counts.sum()),
        "mean_turns": float(counts.mean()),
        "one_turn": float((counts == 1).mean()),
        **{f"over_{limit // 1024}k_tokens": float((totals > limit).mean()) for limit in OVER},
        "mean_tokens": float(totals.mean()),
        "question_share": float(questions / totals.sum()),
    }


def _turns(u: np.ndarray) -> np.ndarray:
    """Numbers of turns at the quantiles `u`: one, or two and more by a geometric law cut off at the most."""
    extra = np.arange(MOST_TURNS - 1)
    wanted = (MEAN_TURNS - ONE_TURN) / (1 - ONE_TURN) - 2
    ratio = brentq(lambda r: float((extra * r**extra).sum() / (r**extra).sum()) - wanted, 0.01, 1.5)
    weights = np.concatenate([[ONE_TURN], (1 - ONE_TURN) * ratio**extra / (ratio**extra).sum()])
    return 1 + np.searchsorted(np.cumsum(weights), np.minimum(u, 1 - 1e-12))


def _tokens(z: np.ndarray) -> np.ndarray:
    """Tokens of sessions, log-normal through the two published shares."""
    (low, p_low), (high, p_high) = OVER.items()
    sigma = np.log(high / low) / (norm.isf(p_high) - norm.isf(p_low))
    mean = np.log(low) - sigma * norm.isf(p_low)
    return np.minimum(np.exp(mean + sigma * z), MOST_TOKENS)


def _split(total: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """A session's tokens over its turns, two at least for each."""
    weights = rng.gamma(EVENNESS, size=count)
    return np.maximum(2, (total * weights / weights.sum()).round()).astype(int)


def _turn(tokens: int, question_share: float) -> Turn:
    question = min(max(1, round(tokens * question_share)), int(tokens) - 1)
    return Turn(question, int(tokens) - question)


def timed(
    names: Sequence[str], turns: Sequence[Sequence[Turn]], rate: float, think_s: float, rng: np.random.Generator
) -> list[Conversation]:
    """With times as in `drawn`; the rate stretches the arrivals, and changes nothing else."""
    starts = np.cumsum(rng.exponential(1 / rate, len(names)))
    return [
        Conversation(name, float(start), tuple(own), tuple(rng.exponential(think_s, len(own) - 1).tolist()))
        for name, start, own in zip(names, starts, turns, strict=True)
    ]


def _exchanges(said: Sequence[dict[str, Any]]) -> list[Turn]:
    """Questions that have an answer right behind them."""
    return [
        Turn(_count(asked["value"]), _count(answer["value"]))
        for asked, answer in pairwise(said)
        if (asked["from"], answer["from"]) in (("human", "gpt"), ("user", "assistant"))
    ]


def _count(text: str) -> int:
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN))
