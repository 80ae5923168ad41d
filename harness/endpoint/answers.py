"""Reads the answer to one request: its text, its tokens with their times, and why it ended."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import inf
from statistics import fmean
from typing import Any

from harness.endpoint.client import Event, TryAgain
from harness.prompts.prompt import Tokenizer, tokenize


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold what a server answered. `began`: when it was asked (`perf_counter`); `token_s`: seconds from
    then until each token had come; `usage`: the tokens that the server counted, if it says so."""

    began: float
    text: str
    tokens: list[int]
    token_s: list[float]
    stop: str
    usage: dict[str, Any]


def read_answer(
    began: float, events: Iterable[Event], tokenizer: Tokenizer, stops: Sequence[str]
) -> Answer:
    """Return the answer that a stream of completions, or of chat completions, holds. `began`: when it
    was asked for (`perf_counter`); `stops`: the stop strings that were asked for.

    Tokens are the server's own where it gives their ids (vLLM), otherwise those into which `tokenizer`
    divides the text, with EOS where the server says that the answer ended by itself. A token has come
    when the piece with its last character has; tokens of one piece share the time since the one
    before it evenly. Raise an error that makes the client ask again if the stream is broken off."""
    pieces, usage = list[tuple[float, str, list[int]]](), dict[str, Any]()
    finish: str | None = None
    matched: Any = ""  # what ended the answer, where the server says so: None or a token for EOS
    for at, event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            said = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            pieces.append((at, said, choice.get("token_ids") or []))
            finish = choice.get("finish_reason") or finish
            matched = choice.get("stop_reason", choice.get("matched_stop", matched))
    if finish is None:
        raise TryAgain("its stream ended before the answer did")
    text = "".join(said for _, said, _ in pieces)
    found = [place for place in map(text.find, stops) if place >= 0]
    by_string = bool(found) or (finish == "stop" and bool(stops) and isinstance(matched, str))
    came = [(at, token) for at, _, ids in pieces for token in ids]
    if not came:
        ends = list(accumulate(len(said) for _, said, _ in pieces))
        own = tokenize(tokenizer, text)
        came = [
            (pieces[bisect_left(ends, end)][0], token)
            for token, end in zip(own.ids, own.ends, strict=True)
        ]
        eos = tokenizer.eos_token_id  # also in place of a stop string that nothing precedes
        if finish == "stop" and not (by_string and came) and isinstance(eos, int):
            came.append((pieces[-1][0], eos))
    stop = "length" if finish == "length" else "stop_string" if by_string else "eos"
    text, tokens = text[: min(found, default=None)], [token for _, token in came]
    return Answer(began, text, tokens, list(_token_s(at - began for at, _ in came)), stop, usage)


def _token_s(came: Iterable[float]) -> Iterator[float]:
    """Yield when each token had come, given when the piece with it did."""
    before: float | None = None
    for at, group in groupby(came):
        count = len(list(group))
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
    if len(own) < count or None in own:  # the first token of all has no likelihood
        return None
    tops = [max((top or {}).values(), default=inf) for top in best] or [inf] * count
    return [(float(cost), cost >= top) for cost, top in zip(own, tops, strict=True)]


def mean_nll(costs: list[tuple[float, bool]]) -> float:
    """Return the mean negative log-likelihood of tokens in nats."""
    return -fmean(cost for cost, _ in costs)
