"""Draws how many turns and tokens conversations have, as in ShareGPT, and computes the statistics
by which a set of conversations is judged.

CachedAttention (arXiv:2403.19708, sections 2.3, 2.4 and 4.2) publishes that 27 % of the
conversations have one turn, that they have 5.75 turns on average and 40 at most, that 47 % hold
more than 2K tokens and 30 % more than 4K. A conversation is called a session here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm

ONE_TURN, MEAN_TURNS, MOST_TURNS = 0.27, 5.75, 40
OVER = {2048: 0.47, 4096: 0.30}  # tokens of a session -> share of sessions that hold more
MOST_TOKENS = 32_768
# how even a session's turns are: the shape of the gamma law from which their lengths are drawn
EVENNESS = 2.0
QUESTION_SHARE = 0.3  # share of a turn's tokens that the question has; not published
ASKED_ANSWERED = (("human", "gpt"), ("user", "assistant"))

Floats = NDArray[np.float64]


def drawn(
    sessions: int,
    rng: np.random.Generator,
    *,
    correlation: float = 0.0,
    scale: float = 1.0,
    turns: int | None = None,
) -> list[list[int]]:
    """Draw sessions (conversations). Return for each the tokens of its turns, question and answer
    together.

    `correlation`: a session's numbers of turns and of tokens are made from two normal variables
    with this correlation, because sessions with more turns have more tokens. `scale`: all tokens
    are multiplied by it. `turns`: every session has so many, instead of a drawn number."""
    first = rng.standard_normal(sessions)
    second = correlation * first + np.sqrt(1 - correlation**2) * rng.standard_normal(sessions)
    counts = _turns(norm.cdf(first)) if turns is None else np.full(sessions, turns)
    return [
        _split(scale * total, int(count), rng)
        for total, count in zip(_tokens(second), counts, strict=True)
    ]


def parted(tokens: int, question_share: float) -> tuple[int, int]:
    """Split a turn's tokens into those of the question and those of the answer, at least one each,
    with about `question_share` of them in the question."""
    question = min(max(1, round(tokens * question_share)), tokens - 1)
    return question, tokens - question


def opened(parts: Sequence[tuple[int, int]], least: int) -> list[tuple[int, int]]:
    """Lengthen the first question of a conversation to at least `least` tokens; everything after it
    shrinks in proportion to make up for that, as far as possible. `parts`: the tokens of question
    and answer of each turn.

    >>> opened([(10, 20), (30, 40)], 55)
    [(55, 10), (15, 20)]
    """
    (first, answer), *rest = parts
    others = answer + sum(map(sum, rest))
    if first >= least:
        return list(parts)
    kept = max(0.0, 1 - (least - first) / others)
    shrunk = [(max(1, round(kept * a)), max(1, round(kept * b))) for a, b in [(0, answer), *rest]]
    return [(least, shrunk[0][1]), *shrunk[1:]]


def statistics(
    sessions: Sequence[Sequence[tuple[int, int]]], scale: float = 1.0
) -> dict[str, float]:
    """Return the statistics of lengths by which a set of conversations (sessions) is compared with
    ShareGPT's.

    `sessions`: tokens of the question and of the answer of each turn. `scale`: the limits of the
    shares of long sessions are multiplied by it."""
    counts = np.array([len(session) for session in sessions])
    totals = np.array([sum(map(sum, session)) for session in sessions])
    questions = sum(question for session in sessions for question, _ in session)
    return {
        "sessions": len(sessions),
        "turns": int(counts.sum()),
        "mean_turns": float(counts.mean()),
        "one_turn": float((counts == 1).mean()),
        **{
            f"over_{limit // 1024}k_tokens": float((totals > limit * scale).mean())
            for limit in OVER
        },
        "mean_tokens": float(totals.mean()),
        "question_share": float(questions / totals.sum()),
    }


# A conversation in ShareGPT's layout.
SHAREGPT = {"conversations": [{"from": "text", "value": "text"}], "id?": "text or a whole number"}


def exchanges(said: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return each question of a conversation in ShareGPT's layout with its answer; one that is
    not followed by an answer is left out.

    >>> exchanges([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}])
    [('Hi', 'Hello')]
    """
    pairs = pairwise(said)
    return [
        (one["value"], two["value"])
        for one, two in pairs
        if (one["from"], two["from"]) in ASKED_ANSWERED
    ]


def _turns(u: Floats) -> NDArray[np.intp]:
    """Return numbers of turns, the quantiles `u` (from 0 to 1) of their distribution: one turn, or
    two and more by a geometric distribution that is cut off at MOST_TURNS."""
    extra = np.arange(MOST_TURNS - 1)
    wanted = (MEAN_TURNS - ONE_TURN) / (1 - ONE_TURN) - 2
    ratio = brentq(lambda r: float((extra * r**extra).sum() / (r**extra).sum()) - wanted, 0.01, 1.5)
    weights = np.concatenate([[ONE_TURN], (1 - ONE_TURN) * ratio**extra / (ratio**extra).sum()])
    return 1 + np.searchsorted(np.cumsum(weights), np.minimum(u, 1 - 1e-12))


def _tokens(z: Floats) -> Floats:
    """Return the tokens of whole conversations for standard normal variables `z`: a log-normal
    distribution through the two published shares, cut off at MOST_TOKENS."""
    (low, p_low), (high, p_high) = OVER.items()
    sigma = np.log(high / low) / (norm.isf(p_high) - norm.isf(p_low))
    mean = np.log(low) - sigma * norm.isf(p_low)
    return np.asarray(np.minimum(np.exp(mean + sigma * z), MOST_TOKENS))


def _split(total: float, count: int, rng: np.random.Generator) -> list[int]:
    """Split a conversation's tokens at random over its `count` turns, at least two each."""
    weights = rng.gamma(EVENNESS, size=count)
    return [int(tokens) for tokens in np.maximum(2, (int(total) * weights / weights.sum()).round())]
