"""What one generation gave, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Stop = Callable[[list[int]], str | None]  # tokens so far -> why to stop, or None
LENGTH, FORCED, LEFT = "length", "forced", "left"
UNCLOCKED = "a captured step is replayed as a whole, and nobody reads a clock within it; graphs=off clocks transfers"


def never(tokens: list[int]) -> str | None:
    """Run to the length limit."""
    return None


def after(count: int) -> Stop:
    """Stop behind the last of `count` tokens that were given."""
    return lambda tokens: FORCED if len(tokens) == count else None


@dataclass(slots=True)
class Generation:
    """What a sequence gave, or B of equal length that share a cache. Seconds count from the start of the prefill and
    stand still while other sequences of the batch come and go (harness/engine/batch/running_sequence.py)."""

    tokens: list[list[int]]  # per sequence, up to and with the token that stopped it
    stops: list[str]  # per sequence
    token_s: list[float] = field(default_factory=list)  # when step i's tokens were on the host
    seal_s: float | None = None
    question_s: float | None = None
    share_s: float = 0.0  # of the machine's time: own prefill and seal, an equal part of each step it was in
    decode_share_s: float = 0.0  # the same of the steps behind the second token
    sealed: bool = False
    fallback: str | None = None
    measured: dict[str, float | None] = field(default_factory=dict)  # of its steps: harness/results/measures.py
    kv: dict[str, int] = field(default_factory=dict)  # bytes by tier
    fidelity: list[dict[str, Any] | None] | None = None  # per sequence
    nll: list[float] | None = None  # per sequence, where the tokens were given (harness/prompts/teacher.py)
    likeliest: list[bool] | None = None  # per sequence, whether all given tokens were what the model would say
    trace: dict[str, Any] | None = None  # of the steps it was in
    not_finite: int | None = None  # the first token, from 0, whose logits held NaN or infinity
    unclocked: str | None = None  # why nobody knows for how long its steps waited for rows that moved
    recomputed: int = 0  # how often its text was computed anew because it outgrew the model's rotation
    capture_s: float | None = None  # capturing its first decode step, inside the second token's time
