"""The totals of one run of the loop, from its answers.

Hit rates count turns, first turns included, which have no history to be found (`returning` is the share of turns that
have one). Prefill throughput counts prompts whole, what was reused included, as CachedAttention does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.cachedattention.simulation.costs import Prices
from methods.tiers.tier import DISK, HOST, TIERS


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


GPUS = 1  # this harness runs on one device


def figures(answers: Sequence[Answer], elapsed_s: float, idle_s: float) -> dict[str, Any]:
    """Seconds, tokens, shares from 0 to 1. Busy is what is not idle: the device is kept for the loop."""
    prompts = sum(one.prompt_tokens for one in answers)
    prefill_s = sum(one.prefill_s for one in answers)
    found = [one for one in answers if one.tier]
    return {
        "sessions": len({one.session for one in answers}),
        "turns": len(answers),
        "returning": sum(one.turn > 1 for one in answers) / len(answers),
        "hit_rate": len(found) / len(answers),
        **{f"hit_rate_{tier}": sum(one.tier == tier for one in found) / len(answers) for tier in TIERS},
        "lost_turns": sum(one.lost_to is not None for one in answers),
        "reused_tokens": sum(one.reused_tokens for one in answers) / prompts,
        **_spread("ttft", [one.ttft_s for one in answers]),
        **_spread("queue", [one.queue_s for one in answers]),
        "load_s": float(np.mean([one.load_s for one in answers])),
        "hidden_s": float(np.mean([one.hidden_s for one in answers])),
        "save_ahead_s": float(np.mean([one.save_ahead_s for one in answers])),
        "save_s": float(np.mean([one.save_s for one in answers])),
        "save_hidden_s": float(np.mean([one.save_hidden_s for one in answers])),
        "prefill_tok_s": prompts / prefill_s if prefill_s else None,
        "tpot_p50_s": _median([later - one for answer in answers for one, later in _steps(answer)]),
        "answer_tokens": sum(len(one.tokens) for one in answers),
        "elapsed_s": elapsed_s,
        "busy_s": elapsed_s - idle_s,
        "turns_per_s": len(answers) / elapsed_s if elapsed_s else None,
    }


def cost(busy_s: float, prices: Prices, reserved: Mapping[str, int]) -> dict[str, float]:
    """Of a device for as long as it was busy, and of the storage that was `reserved` (bytes by tier) for as long."""
    device, storage = prices.usd(busy_s / 3600, GPUS, reserved.get(HOST, 0), reserved.get(DISK, 0))
    return {"cost_usd": device + storage, "storage_share": storage / (device + storage) if busy_s else 0.0}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99])
    return {f"{name}_s": float(np.mean(values)), f"{name}_p50_s": p50, f"{name}_p90_s": p90, f"{name}_p99_s": p99}


def _steps(answer: Answer) -> list[tuple[float, float]]:
    """The times around each token behind the second: the method's seal lies before that one."""
    return list(zip(answer.token_s[1:], answer.token_s[2:], strict=False))


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None
