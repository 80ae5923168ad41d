"""How long conversations are: the law behind stand-ins for ShareGPT, and what a set of them is judged by.

CachedAttention (arXiv:2403.19708, sections 2.3, 2.4 and 4.2) publishes that 27 % of the conversations have one turn,
5.75 turns on average, at most 40; that 47 % hold more than 2K tokens and 30 % more than 4K.
"""

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
EVENNESS = 2.0  # of a session's turns: shape of the gamma law their lengths are drawn from
QUESTION_SHARE = 0.3  # of a turn's tokens; not published
ASKED_ANSWERED = (("human", "gpt"), ("user", "assistant"))

Floats = NDArray[np.float64]


def drawn(
    sessions: int, rng: np.random.Generator, *, correlation: float = 0.0, scale: float = 1.0, turns: int | None = None
) -> list[list[int]]:
    """Tokens of each turn of each session, questions with answers.

    correlation: of the normal variables behind turns and tokens, as more turns have more tokens. scale: of all tokens.
    turns: of every session, in place of the law's.
    """
    first = rng.standard_normal(sessions)
    second = correlation * first + np.sqrt(1 - correlation**2) * rng.standard_normal(sessions)
    counts = _turns(norm.cdf(first)) if turns is None else np.full(sessions, turns)
    return [_split(scale * total, int(count), rng) for total, count in zip(_tokens(second), counts, strict=True)]


def parted(tokens: int, question_share: float) -> tuple[int, int]:
    """Tokens of a turn's question and answer, one at least for each."""
    question = min(max(1, round(tokens * question_share)), tokens - 1)
    return question, tokens - question


def opened(parts: Sequence[tuple[int, int]], least: int) -> list[tuple[int, int]]:
    """A session whose first question has `least` tokens, taken from all that follows as far as that goes.

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


def statistics(sessions: Sequence[Sequence[tuple[int, int]]], scale: float = 1.0) -> dict[str, float]:
    """What a stand-in has to be judged by. sessions: tokens of the question and the answer of each turn; the shares of
    long sessions count tokens divided by `scale`."""
    counts = np.array([len(session) for session in sessions])
    totals = np.array([sum(map(sum, session)) for session in sessions])
    questions = sum(question for session in sessions for question, _ in session)
    return {
        "sessions": len(sessions),
        "turns": int(counts.sum()),
        "mean_turns": float(counts.mean()),
        "one_turn": float((counts == 1).mean()),
        **{f"over_{limit // 1024}k_tokens": float((totals > limit * scale).mean()) for limit in OVER},
        "mean_tokens": float(totals.mean()),
        "question_share": float(questions / totals.sum()),
    }


# a conversation in ShareGPT's layout
SHAREGPT = {"conversations": [{"from": "text", "value": "text"}], "id?": "text or a whole number"}


def exchanges(said: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Of what is said in such a conversation: questions with the answer right behind them.

    >>> exchanges([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}])
    [('Hi', 'Hello')]
    """
    pairs = pairwise(said)
    return [(one["value"], two["value"]) for one, two in pairs if (one["from"], two["from"]) in ASKED_ANSWERED]


def _turns(u: Floats) -> NDArray[np.intp]:
    """Numbers of turns at the quantiles `u`: one, or two and more by a geometric law cut off at the most."""
    extra = np.arange(MOST_TURNS - 1)
    wanted = (MEAN_TURNS - ONE_TURN) / (1 - ONE_TURN) - 2
    ratio = brentq(lambda r: float((extra * r**extra).sum() / (r**extra).sum()) - wanted, 0.01, 1.5)
    weights = np.concatenate([[ONE_TURN], (1 - ONE_TURN) * ratio**extra / (ratio**extra).sum()])
    return 1 + np.searchsorted(np.cumsum(weights), np.minimum(u, 1 - 1e-12))


def _tokens(z: Floats) -> Floats:
    """Tokens of sessions, log-normal through the two published shares."""
    (low, p_low), (high, p_high) = OVER.items()
    sigma = np.log(high / low) / (norm.isf(p_high) - norm.isf(p_low))
    mean = np.log(low) - sigma * norm.isf(p_low)
    return np.asarray(np.minimum(np.exp(mean + sigma * z), MOST_TOKENS))


def _split(total: float, count: int, rng: np.random.Generator) -> list[int]:
    """A session's tokens over its turns, two at least for each."""
    weights = rng.gamma(EVENNESS, size=count)
    return [int(tokens) for tokens in np.maximum(2, (int(total) * weights / weights.sum()).round())]
