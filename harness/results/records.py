"""One line of `examples.jsonl`: what was asked of an example, the answer, the time of each token,
and the cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, Literal, TypeVar

from harness.results.fact import mean
from harness.results.facts import FACTS, facts_of, over_turns


class StoreError(ValueError):
    """Results cannot be read or written; the message says what to do."""


class RecordError(StoreError):
    """A record, or a line that should hold one, does not have the form that the harness writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to one user turn. The clock of a further turn begins with its own prefill, or
    under protocol=context with its question."""

    history_tokens: int = 0  # of earlier turns, prompts and answers
    prompt_tokens: int
    # tokens sealed before the question was read; null unless protocol=context
    context_tokens: int | None
    output: str
    tokens: list[int]
    stop: str  # eos, stop_string, length, forced, or thought where the thought was cut
    score: float  # [0, 1]
    details: dict[str, Any]
    # one per token: from the start of prefill until each token was on the host
    token_s: list[float]
    # all else that is known of it: those of harness/results/facts.py, by key
    facts: Mapping[str, Any]

    def __post_init__(self) -> None:
        whose = f"example {self.id!r}: " if isinstance(self, Record) else ""
        if not 0.0 <= self.score <= 1.0:
            raise RecordError(f"{whose}score is {self.score}, the task's score must lie in [0, 1]")
        if not len(self.tokens) == len(self.token_s) > 0:
            raise RecordError(
                f"{whose}{len(self.tokens)} tokens with {len(self.token_s)} times in token_s"
            )

    def __getitem__(self, key: str) -> Any:
        """Return a fact of harness/results/facts.py by its key."""
        return self.facts[key]

    @property
    def data(self) -> dict[str, Any]:
        """Return what the task said of the example: depth, length ..."""
        return self["data"]

    @property
    def answer(self) -> tuple[str, tuple[int, ...]]:
        """The text and the tokens, which are compared to see if two generations are the same. For a
        text that was fed by force, the text here is its likelihood."""
        return self.output, tuple(self.tokens)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0]

    @property
    def tt2t_s(self) -> float | None:
        return self.token_s[1] if len(self.token_s) > 1 else None

    @property
    def tpot_s(self) -> float | None:
        """The mean time per token after the second; None if there is no third token."""
        return fmean(intervals) if (intervals := self.intervals_s) else None

    @property
    def replies(self) -> Sequence[Reply]:
        """The replies, one for each user turn."""
        return (self,)

    @property
    def intervals_s(self) -> list[float]:
        """The times between successive tokens from the second on. The time before the second token
        is left out, because the method digests the prompt (the seal) in it."""
        return [b - a for reply in self.replies for a, b in pairwise(reply.token_s[1:])]

    @property
    def sealed_at(self) -> int:
        """The number of tokens in the cache when the method digested the prompt (the seal), of which a budget is a
        share."""
        return (
            self.history_tokens + self.prompt_tokens
            if self.context_tokens is None
            else self.context_tokens
        )

    def share(self, measure: str) -> float | None:
        """Return a number of prompt tokens that steps read, such as "attended_prompt" (per query
        head) or "union_prompt" (distinct ones per KV head), as a share of the sealed ones."""
        known = [(reply[measure], reply.sealed_at) for reply in self.replies]
        return mean([tokens / sealed for tokens, sealed in known if tokens is not None and sealed])


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Reply):
    """The raw record of one example; every table can be made again from these lines.

    For a conversation, the fields of `Reply` describe all turns together (`whole`).
    """

    id: str
    group: str
    prompt_sha256: str

    @property
    def turns(self) -> Sequence[Reply] | None:
        """The replies of a conversation, one for each of its turns; None for an example of one turn."""
        turns: Sequence[Reply] | None = self["turns"]
        return turns

    @property
    def independent(self) -> str:
        """The id of the unit that statistics count as one: the text that several questions are
        about, or the example itself."""
        return self["unit"] or self.id

    @property
    def replies(self) -> Sequence[Reply]:
        return self.turns or (self,)

    def rescored(self, line: Mapping[str, Any]) -> Record:
        """Return the record with the later scores of a line of rescored.jsonl."""
        again = line.get("turns", [line])
        turns = self.turns and [
            replace(turn, score=one["score"], details=one["details"])
            for turn, one in zip(self.turns, again, strict=True)
        ]
        facts = {**self.facts, "turns": turns}
        return replace(self, score=line["score"], details=line["details"], facts=facts)

    def to_json(self) -> str:
        """Return the record as one line of JSON, without a newline."""
        plain = _line(self, (*HEAD, *CORE))
        if self.turns:
            plain["turns"] = [_line(turn, CORE) for turn in self.turns]
        try:
            return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise RecordError(f"example {self.id!r} cannot be written as JSON: {error}") from error

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], where: str) -> Record:
        """Return the record that a line of examples.jsonl holds. Unknown keys are ignored, because
        older versions wrote more of them. Raise `RecordError`, whose message begins with `where`,
        if a key is missing."""
        required = {key for key, fact in FACTS.items() if fact.required}
        if missing := (REQUIRED | required) - plain.keys():
            lacking = ", ".join(f"no {key!r}" for key in sorted(missing))
            raise RecordError(
                f"{where}: {lacking}; another version of the harness wrote this run, or no run at all"
            )
        try:
            turns = [made(Reply, turn) for turn in plain.get("turns") or ()]
            return made(cls, {**plain, "turns": turns or None})
        except (RecordError, TypeError) as error:
            raise RecordError(f"{where}: {error}") from error


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Hold the line of an example that has no answer, and the reason. An example that failed
    (`error`) is tried again the next time that the run is started. One that is too long for the
    model's window (`skipped`, under too_long=skip) is not."""

    id: str
    group: str
    prompt_sha256: str
    prompt_tokens: int  # of all its turns
    kind: Literal["error", "skipped"]
    why: str  # the error's class and message, or by how much it is too long

    def to_json(self) -> str:
        """Return the line as JSON, without a newline."""
        plain = asdict(self)
        plain[plain.pop("kind")] = plain.pop("why")
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], where: str) -> LeftOut:
        """Return the example that a line of examples.jsonl holds. Raise `RecordError`, whose
        message begins with `where`, if a key is missing."""
        kind: Any = "error" if "error" in plain else "skipped"
        try:
            given = {key: plain[key] for key in (*HEAD, "prompt_tokens", kind)}
        except KeyError as error:
            raise RecordError(
                f"{where}: no {error.args[0]}; no run of the harness wrote this line"
            ) from error
        return cls(kind=kind, why=given.pop(kind), **given)


def made(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """Return a reply or record from values by the keys of a line; unknown keys are dropped. Facts
    that an older line lacks have the value that their table names."""
    given = {
        name: values[name]
        for name in (*HEAD, *CORE)
        if name in values and name in kind.__dataclass_fields__
    }
    return kind(**given, facts=facts_of(values, example=issubclass(kind, Record)))


def _line(reply: Reply, names: Sequence[str]) -> dict[str, Any]:
    """Return a reply as a line stores it: the fields `names`, and a key for each fact."""
    return {**{name: getattr(reply, name) for name in names}, **reply.facts}


def whole(turns: Sequence[Reply]) -> dict[str, Any]:
    """Return, by the keys of a line, the values of one reply that stands for all turns of a conversation.
    Scores are means over the turns; tokens and seconds are added up, as if each turn followed the
    last at once. Facts say themselves what the turns give."""
    ends = list(accumulate((turn.token_s[-1] for turn in turns), initial=0.0))
    return {
        "turns": list(turns),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "context_tokens": turns[0].context_tokens,
        "output": "\n".join(turn.output for turn in turns),
        "tokens": [token for turn in turns for token in turn.tokens],
        "stop": turns[-1].stop,
        **scored([(turn.score, turn.details) for turn in turns]),
        "token_s": [
            end + at for end, turn in zip(ends, turns, strict=False) for at in turn.token_s
        ],
        **over_turns([turn.facts for turn in turns]),
    }


def scored(turns: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return `score` and `details` of a conversation: the means over its turns. Details that are
    not numbers are dropped."""
    named = {
        name
        for _, details in turns
        for name, value in details.items()
        if isinstance(value, (int, float))
    }
    means = {name: mean([details.get(name) for _, details in turns]) for name in sorted(named)}
    return {"score": fmean(score for score, _ in turns), "details": means}


Kind = TypeVar("Kind", bound=Reply)
HEAD = ("id", "group", "prompt_sha256")  # stand first in a line
CORE = tuple(field.name for field in fields(Reply) if field.name != "facts")
REQUIRED = {*HEAD, *(field.name for field in fields(Reply) if field.default is MISSING)} - {"facts"}
