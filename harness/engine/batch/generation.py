"""Holds the result of one generation, and the rules by which one ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Stop = Callable[[list[int]], str | None]  # tokens so far -> why to stop, or None
LENGTH, FORCED, LEFT = "length", "forced", "left"
UNCLOCKED = "a captured step runs as a whole and cannot be clocked inside; graphs=off clocks transfers"


def never(tokens: list[int]) -> str | None:
    """Return None for any tokens: the answer runs to its length limit."""
    return None


def after(count: int) -> Stop:
    """Return a rule that stops after the last of `count` given tokens."""
    return lambda tokens: FORCED if len(tokens) == count else None


@dataclass(slots=True)
class Generation:
    """Hold the answer of one sequence, or of B sequences of equal length that share a cache, and
    its measurements.

    Seconds count from the start of the prefill. The clock stands still while other sequences of the
    batch join or leave (harness/engine/batch/running_sequence.py)."""

    tokens: list[list[int]]  # per sequence, including the token that stopped it
    stops: list[str]  # per sequence, why it ended
    token_s: list[float] = field(default_factory=list)  # when step i's tokens were on the host
    seal_s: float | None = None
    question_s: float | None = None
    share_s: float = 0.0  # machine seconds: its prefill and seal, and an equal part of each step it was in
    decode_share_s: float = 0.0  # machine seconds after the second token
    sealed: bool = False
    fallback: str | None = None
    measured: dict[str, float | None] = field(default_factory=dict)  # means over steps (harness/results/measures.py)
    kv: dict[str, int] = field(default_factory=dict)  # bytes held per tier
    fidelity: list[dict[str, Any] | None] | None = None  # per sequence
    nll: list[float] | None = None  # per sequence, where the tokens were given (harness/prompts/teacher.py)
    likeliest: list[bool] | None = None  # per sequence, whether the model would have chosen every given token
    trace: dict[str, Any] | None = None  # medians over its clocked steps (harness/engine/trace.py)
    not_finite: int | None = None  # index of the first token whose logits held NaN or infinity
    unclocked: str | None = None  # why the time its steps waited for moving rows is unknown
    recomputed: int = 0  # how often its text was computed again because it outgrew the model's rotation
    capture_s: float | None = None  # time to capture its first decode step, part of the second token's time
