"""Reads the answer to one request: its text, its tokens with their times, and why it ended."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from statistics import fmean
from typing import Any

from harness.endpoint.client import Event, broken_off
from harness.prompts.prompt import Tokenizer, tokenize


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold what a server answered. `token_s`: seconds from the request until each token had come;
    `began`: the time of the request (`perf_counter`); `usage`: the tokens that the server counted, if
    it says so."""

    text: str
    tokens: list[int]
    token_s: list[float]
    stop: str
    began: float
    usage: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Piece:
    at: float
    text: str
    ids: list[int]


def read_answer(
    began: float, events: Iterable[Event], tokenizer: Tokenizer, stops: tuple[str, ...]
) -> Answer:
    """Return the answer that a stream of completions, or of chat completions, holds. `stops`: the
    stop strings that were asked for.

    Tokens are the server's own where it gives their ids (vLLM), otherwise those into which `tokenizer`
    divides the text, with EOS where the server says that the answer ended by itself. A token has come
    when the piece with its last character has; tokens of one piece share the time since the one
    before it evenly. Raise an error that makes the client ask again if the stream is broken off."""
    pieces, usage = list[_Piece](), dict[str, Any]()
    finish: str | None = None
    matched: Any = None
    for at, event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            pieces.append(_Piece(at, text, list(choice.get("token_ids") or ())))
            finish = choice.get("finish_reason") or finish
            matched = choice.get("stop_reason", choice.get("matched_stop", matched))
    if finish is None:
        raise broken_off()
    text = "".join(piece.text for piece in pieces)
    found = [place for place in map(text.find, stops) if place >= 0]
    by_string = bool(found) or (finish == "stop" and bool(stops) and not isinstance(matched, int))
    placed = list(_placed(pieces, text, tokenizer))
    if finish == "stop" and not by_string and not any(piece.ids for piece in pieces):
        eos = tokenizer.eos_token_id
        placed += [(len(pieces) - 1, eos)] if isinstance(eos, int) else []
    tokens, times = [token for _, token in placed], list(_times(pieces, placed, began))
    stop = "length" if finish == "length" else "stop_string" if by_string else "eos"
    return Answer(text[: min(found, default=None)], tokens, times, stop, began, usage)


def _placed(pieces: list[_Piece], text: str, tokenizer: Tokenizer) -> Iterator[tuple[int, int]]:
    """Yield each token of an answer after the number of the piece that it came with."""
    if any(piece.ids for piece in pieces):
        yield from ((place, token) for place, piece in enumerate(pieces) for token in piece.ids)
        return
    ends = list(accumulate(len(piece.text) for piece in pieces))
    found = tokenize(tokenizer, text)
    for token, end in zip(found.ids, found.ends, strict=True):
        yield bisect_left(ends, end), token


def _times(pieces: list[_Piece], placed: list[tuple[int, int]], began: float) -> Iterator[float]:
    """Yield when each token had come, in seconds since the request."""
    before: float | None = None
    for place, group in groupby(placed, key=lambda each: each[0]):
        at, count = pieces[place].at - began, len(list(group))
        start = at if before is None else before
        yield from (start + (at - start) * (number + 1) / count for number in range(count))
        before = at


def costs_of(event: dict[str, Any], start: int, count: int) -> list[tuple[float, bool]] | None:
    """Return, for `count` tokens of an echoed prompt from token `start` on, the log-likelihood of each
    and whether it was the most likely one; None if the server returns no such numbers."""
    choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
    said = choice.get("logprobs") or {}
    own, best = (
        (said.get(key) or ())[start : start + count] for key in ("token_logprobs", "top_logprobs")
    )
    if len(own) < count or None in own or start == 0:
        return None
    tops = [max((top or {}).values(), default=None) for top in best] or [None] * count
    return [
        (float(cost), top is not None and cost >= top) for cost, top in zip(own, tops, strict=True)
    ]


def mean_nll(costs: list[tuple[float, bool]]) -> float:
    """Return the mean negative log-likelihood of tokens in nats."""
    return -fmean(cost for cost, _ in costs)
