"""Time that passes as a test says: 0.1 s per prompt token, 1 s per step of all slots."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from harness.engine.attach import Attachment
from harness.engine.batch.running_sequence import never
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.graph import CapturedStep
from harness.jobs.examples import PreparedExample

TOKEN_S, STEP_S = 0.1, 1.0


class Time:
    """Stands still until somebody lets it pass."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


class Timed(Engine):
    """An engine whose steps and prompts take the seconds they are given."""

    def __init__(self, attachment: Attachment, time: Time, *, token_s: float = TOKEN_S) -> None:
        super().__init__(attachment)
        self.time, self.token_s = time, token_s

    def prefill(self, cache: KVCache, prompt: Tensor, *, whole: bool = False) -> Tensor:
        self.time.passes(self.token_s * prompt.shape[1])
        return super().prefill(cache, prompt, whole=whole)

    def decode(self, ids: Tensor, cache: KVCache, captured: CapturedStep | None) -> Tensor:
        self.time.passes(STEP_S)
        return super().decode(ids, cache, captured)


def ending(item: PreparedExample) -> dict[str, Any]:
    """Every answer has the length that the trace says."""
    return {"max_new_tokens": item.new_tokens, "stops": [never], "sampler": None}
