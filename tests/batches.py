"""Prompts that step together as one running batch until the last has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from harness import Engine, RunningBatch
from harness.engine.batch.running_sequence import Generation


def together(engine: Engine, prompts: Sequence[Tensor], new: int | Sequence[int], **how: Any) -> list[Generation]:
    """Return the answers of prompts [B S], each of `new` tokens at most, or of so many as stand at its place."""
    counts = [new] * len(prompts) if isinstance(new, int) else new
    batch = RunningBatch(engine)
    running = [engine.join(batch, ids, max_new_tokens=n, **how) for ids, n in zip(prompts, counts, strict=True)]
    while batch.sequences:
        batch.step()
    return [one.out for one in running]
