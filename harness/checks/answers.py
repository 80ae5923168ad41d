"""Makes answers of the engine that must be the same in two ways: alone and in a running batch; with
and without a likelihood between seal and answer; to questions that share a sealed context or have
one each."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.engine.batch.running import RunningBatch
from harness.engine.batch.running_sequence import Generation
from harness.engine.engine import Engine
from harness.jobs.questions import SealedContext

READS = ("attended_prompt", "attended_total", "union_prompt", "moved_bytes_per_step", "hit_rate")


def side_by_side(engine: Engine, prompts: Sequence[Tensor], new: int) -> list[Generation]:
    """Answer prompts [1 S] of different lengths in one running batch."""
    batch = RunningBatch(engine)
    slots = [engine.join(batch, prompt, max_new_tokens=new) for prompt in prompts]
    while batch.sequences:
        batch.step()
    return [slot.out for slot in slots]


def apart(
    engine: Engine, context: Tensor, questions: Sequence[Tensor], new: int
) -> list[Generation]:
    """Answer each question [1 Q] on a prefill of the context [1 S] of its own."""
    return [
        engine.generate(
            torch.cat([context, question], 1), context_tokens=context.shape[1], max_new_tokens=new
        )
        for question in questions
    ]


@torch.inference_mode()
def together(
    engine: Engine, context: Tensor, questions: Sequence[Tensor], new: int
) -> list[Generation]:
    """Answer all questions [1 Q] on one prefill of the context [1 S], as questions=shared does."""
    longest = max(questions, key=torch.numel)
    cache = engine.cache(torch.cat([context, longest], 1), new)
    began = perf_counter()
    engine.prefill(cache, context)
    sealed = SealedContext(cache, began)
    return [
        engine.complete(cache, None, question, began=sealed.begin(), max_new_tokens=new)
        for question in questions
    ]


def seen(made: Generation) -> dict[str, Any]:
    """Return what a record holds of an answer, but for times and the room kept free."""
    reads = {name: made.measured.get(name) for name in READS}
    return {"tokens": made.tokens, "fidelity": made.fidelity} | reads
