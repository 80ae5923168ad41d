"""What is recorded of one turn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Seconds run on the loop's clock, those of `token_s` from the arrival of the question; those of loading and of
    saving ahead are the wall's."""

    session: str
    turn: int  # from 1
    arrived_s: float  # from the loop's start
    queue_s: float  # until there was a slot
    load_s: float  # that the turn has waited for its history, a fresh cache too
    hidden_s: float  # in which the history was on its way while the turn computed
    token_s: list[float]  # each token
    save_ahead_s: float = 0.0  # before the first token: handing over the prompt's rows
    save_s: float  # behind the last, until the history was handed over
    save_hidden_s: float = 0.0  # in which its rows left the device while nobody waited for that
    tier: str | None  # where the history was found; null: nowhere
    lost_to: str | None = None  # why it is gone, where it was stored and computing it again gave something else
    reused_tokens: int  # of the prompt, history included
    new_tokens: int  # those that were computed
    tokens: list[int]  # the answer's
    stop: str

    @property
    def ttft_s(self) -> float:
        return self.token_s[0]

    @property
    def prefill_s(self) -> float:
        """From the start of the job to the first token, loading included."""
        return self.ttft_s - self.queue_s

    @property
    def prompt_tokens(self) -> int:
        return self.reused_tokens + self.new_tokens
