"""One line of `examples.jsonl`: what was asked of an example, the answer, the time of each token,
and the cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, Self

from harness.results.measures import MEASURES, means, over_known
from methods.tiers.tier import DEVICE, TIERS, bytes_key

HISTORY_S = ("load_s", "hidden_s", "save_ahead_s", "save_s", "save_hidden_s")  # of a conversation's turn
PEAKS = ("prefill_device", "prefill_host", "decode_device", "decode_host")  # bytes; decode: seal and question too
KV, MEASURED = "kv", "measured"  # fields that a line has as a key for each tier, and for each line of the table


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
    context_tokens: int | None  # tokens sealed before the question was read; null unless protocol=context
    output: str
    tokens: list[int]
    stop: str  # eos, stop_string, length, forced, or thought where the thought was cut
    score: float  # [0, 1]
    details: dict[str, Any]
    token_s: list[float]  # one per token: from the start of prefill until each token was on the host
    share_s: float | None = None  # of the machine's time: own load, prefill, seal and save, an equal part of its steps
    decode_share_s: float | None = None  # the same of the steps after the second token
    seal_s: float | None
    question_s: float | None
    measured: Mapping[str, float | None]  # the numbers of harness/results/measures.py, a key each
    kv: Mapping[str, int]  # bytes of its own cache by tier, a key each; of the whole batch in lines without `share_s`
    sealed: bool
    fallback: str | None  # what the method did in place of its rule, and why
    trace: dict[str, Any] | None
    recomputed: int = 0  # how often its text was computed anew because it outgrew the model's rotation
    capture_s: float | None = None  # capturing the decode step, within the second token's time
    compile_s: float | None = None  # Triton's making kernels ready, within the other times; null where it makes none
    along: dict[str, list[float]] | None = None  # costs along an answer of more than 64 steps, a number per stretch
    data: dict[str, Any]  # what the task said of the example: depth, length ...
    thought_tokens: int | None = None  # of `tokens`, the thought before the answer; null where none was asked for
    hit_tier: str | None = None  # of a conversation's turn: where its history was found; null on a miss
    reused_tokens: int | None = None  # that were found; null where no history is kept or none was asked for
    dropped_tokens: int | None = None  # of its history, that left the window before the turn; null where none can
    lost_turns: int | None = None  # 1: a history that was stored is gone, and computing it again gave something else
    lost_to: str | None = None  # why it is gone, the first of a conversation's
    new_tokens: int | None = None  # that were computed, the history's too where it was not found
    load_s: float | None = None  # waited until the cache was there, within the first token's time
    hidden_s: float | None = None  # in which layers were on their way during the turn's own computing
    save_ahead_s: float | None = None  # handing over the prompt's rows, within the first token's time; null as save_s
    save_s: float | None = None  # after the last token; null where no turn follows
    save_hidden_s: float | None = None  # in which its rows left the device while nobody waited for that

    def __post_init__(self) -> None:
        whose = f"example {self.id!r}: " if isinstance(self, Record) else ""
        if not 0.0 <= self.score <= 1.0:
            raise RecordError(f"{whose}score is {self.score}, the task's score must lie in [0, 1]")
        if not len(self.tokens) == len(self.token_s) > 0:
            raise RecordError(f"{whose}{len(self.tokens)} tokens with {len(self.token_s)} times in token_s")

    @property
    def answer(self) -> tuple[str, tuple[int, ...]]:
        """The text and the tokens, which are compared to see if two generations are the same. For a
        text that was fed by force, the text here is its likelihood."""
        return self.output, tuple(self.tokens)

    @property
    def unanswered(self) -> bool:
        """True if the model's thought did not end, so that there is no answer and the score is 0."""
        return self.thought_tokens == len(self.tokens)

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
    def sealed_tokens(self) -> int:
        """The number of tokens that a budget is a share of: those of the context if it was sealed
        (handed to the method to reduce) alone, else those of the prompt. For a conversation, the
        mean over its turns."""
        return round(fmean(reply.sealed_at for reply in self.replies))

    @property
    def sealed_at(self) -> int:
        """The number of tokens in the cache when the method digested the prompt (the seal)."""
        return self.history_tokens + self.prompt_tokens if self.context_tokens is None else self.context_tokens

    @property
    def attended_share(self) -> float | None:
        return self.share("attended_prompt")

    def share(self, measure: str) -> float | None:
        """Return a number of prompt tokens that steps read, such as "attended_prompt" (per query
        head) or "union_prompt" (distinct ones per KV head), as a share of the sealed ones."""
        known = [(reply.measured.get(measure), reply.sealed_at) for reply in self.replies]
        return over_known(fmean, [tokens / sealed for tokens, sealed in known if tokens is not None and sealed])


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Reply):
    """The raw record of one example; every table can be made again from these lines.

    For a conversation, the fields of `Reply` describe all turns together (`whole`).
    """

    id: str
    group: str
    prompt_sha256: str
    device_peak_bytes: int | None
    host_peak_bytes: int | None
    peaks: dict[str, int | None] | None = None  # the same of the prefill, and of all after it: PEAKS
    warnings: list[str]
    fidelity: dict[str, Any] | None
    prompt_ids: list[int] | None
    cut_tokens: int = 0  # that left its context, by the task's own cut or by the setting too_long
    prefilled_by: str | None = None  # id of whose prefill and seal it used; its clock began with its question
    turns: list[Reply] | None = None  # of a conversation
    unit: str | None = None  # what it belongs to, where examples are not independent; statistics count a unit as one

    @property
    def independent(self) -> str:
        """The id of the unit that statistics count as one: the text that several questions are
        about, or the example itself."""
        return self.unit or self.id

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
        return replace(self, score=line["score"], details=line["details"], turns=turns)

    def to_json(self) -> str:
        """Return the record as one line of JSON, without a newline."""
        plain = flat({name: getattr(self, name) for name in FIELDS})
        if self.turns:
            plain["turns"] = [flat(asdict(turn)) for turn in self.turns]
        try:
            return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise RecordError(f"example {self.id!r} cannot be written as JSON: {error}") from error

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], where: str) -> Record:
        """Return the record that a line of examples.jsonl holds. Unknown keys are ignored, because
        older versions wrote more of them. Raise `RecordError`, whose message begins with `where`,
        if a key is missing."""
        if missing := REQUIRED - plain.keys():
            lacking = ", ".join(f"no {key!r}" for key in sorted(missing))
            raise RecordError(f"{where}: {lacking}; another version of the harness wrote this run, or no run at all")
        try:
            turns = [Reply(**nested(turn)) for turn in plain.get("turns") or ()]
            return cls(**{**nested(plain), "turns": turns or None})
        except (RecordError, TypeError) as error:
            raise RecordError(f"{where}: {error}") from error


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The line of an example that has no answer."""

    id: str
    group: str
    prompt_sha256: str
    prompt_tokens: int  # of all its turns

    def to_json(self) -> str:
        """Return the line as JSON, without a newline."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], where: str) -> Self:
        """Return the example that a line of examples.jsonl holds. Raise `RecordError`, whose
        message begins with `where`, if a key is missing."""
        if missing := [field.name for field in fields(cls) if field.name not in plain]:
            raise RecordError(f"{where}: no {missing[0]}; no run of the harness wrote this line")
        return cls(**{field.name: plain[field.name] for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class FailedExample(LeftOut):
    """The line of an example that failed. The next time that the run is started, the example is
    tried again."""

    error: str  # its class and message

    @property
    def why(self) -> str:
        return self.error


@dataclass(frozen=True, slots=True)
class SkippedExample(LeftOut):
    """The line of an example that is too long for the model's window and was left out, as the
    setting `too_long` asks for. It is not tried again."""

    skipped: str  # by how much it is too long

    @property
    def why(self) -> str:
        return self.skipped


def flat(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reply's fields as a line stores them: the mappings `kv` and `measured` become one
    key per tier and one per measure."""
    others = {name: value for name, value in plain.items() if name not in (KV, MEASURED)}
    sizes = {bytes_key(tier): size for tier, size in plain[KV].items()}
    return others | sizes | {name: plain[MEASURED].get(name) for name in MEASURES}


def nested(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a reply or record from a line that `flat` made; unknown keys are
    dropped. Tiers that an older line lacks hold no bytes, and measures that it lacks are None."""
    sizes = {tier: plain[bytes_key(tier)] for tier in TIERS if bytes_key(tier) in plain}
    others = {key: plain[key] for key in FIELDS if key in plain}
    return others | {KV: sizes, MEASURED: {name: plain.get(name) for name in MEASURES}}


def whole(turns: Sequence[Reply]) -> dict[str, Any]:
    """Return the fields of one reply that stands for all turns of a conversation. Scores and
    measures are means over the turns; tokens and seconds are added up, as if each turn followed the
    last at once; bytes held are the last turn's."""
    ends = list(accumulate((turn.token_s[-1] for turn in turns), initial=0.0))
    first, last = turns[0], turns[-1]
    sums = ("share_s", "decode_share_s", "seal_s", "question_s", "capture_s", "compile_s", *HISTORY_S)
    counts = ("reused_tokens", "dropped_tokens", "lost_turns", "new_tokens")
    return {
        "turns": list(turns),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "context_tokens": first.context_tokens,
        "output": "\n".join(turn.output for turn in turns),
        "tokens": [token for turn in turns for token in turn.tokens],
        "stop": last.stop,
        **scored([(turn.score, turn.details) for turn in turns]),
        "token_s": [end + at for end, turn in zip(ends, turns, strict=False) for at in turn.token_s],
        KV: last.kv,
        "sealed": any(turn.sealed for turn in turns),
        "fallback": next((turn.fallback for turn in turns if turn.fallback), None),
        "recomputed": sum(turn.recomputed for turn in turns),
        "lost_to": next((turn.lost_to for turn in turns if turn.lost_to), None),
        "trace": None,
        "data": dict(first.data),
        MEASURED: means([turn.measured for turn in turns]),
        **{name: over_known(sum, [getattr(turn, name) for turn in turns]) for name in (*sums, *counts)},
    }


def scored(turns: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return `score` and `details` of a conversation: the means over its turns. Details that are
    not numbers are dropped."""
    named = {name for _, details in turns for name, value in details.items() if isinstance(value, (int, float))}
    means = {name: over_known(fmean, [details.get(name) for _, details in turns]) for name in sorted(named)}
    return {"score": fmean(score for score, _ in turns), "details": means}


HEAD = ("id", "group", "prompt_sha256")  # stand first in a line
FIELDS = (*HEAD, *(field.name for field in fields(Record) if field.name not in HEAD))
REQUIRED = {field.name for field in fields(Record) if field.default is MISSING} - {KV, MEASURED} | {bytes_key(DEVICE)}
