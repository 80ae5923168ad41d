"""Runs the forwards of one attached model: prompts, and steps of the sequences that run
together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from harness.engine.attach import Attachment
from harness.engine.batch.cache import SlotsCache
from harness.engine.cache import KVCache
from harness.engine.forward import by_blocks
from harness.engine.graph import CapturedStep, StepCapture, capture_refusal
from harness.engine.kept_steps import KeptSteps
from harness.engine.trace import Tracer
from kernels.threads import step_threads


class Stepper(ABC):
    """Run the forwards of an attached model.

    `forward`: the model by blocks (harness/engine/forward.py); None if the model runs its own
    forward, for the reason in `plain_reason`. `graphs`: captures decode steps
    (harness/engine/graph.py); `plain_steps` says why steps were not captured. `tracer`: clocks the
    parts of each step."""

    tracer: Tracer | None = None
    plain_steps: str | None = None
    unclocked: str | None = None  # why the time that steps waited for moving rows is unknown
    one_by_one: str | None = None  # why members of the last batch attended one after the other

    def __init__(self, attachment: Attachment, graphs: StepCapture | None = None) -> None:
        self.attachment = attachment
        self.model = attachment.model
        self.graphs, self.kept = graphs, KeptSteps()
        self.forward, self.plain_reason = by_blocks(self.model)

    def run(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Run the model on ids [B T]. Return the logits of the last token [B V]."""
        if self.forward is not None:
            return self.forward(ids, cache)
        places = cache.positions(ids.shape[1], ids.device)
        output = self.model(ids, position_ids=places, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = output.logits[:, -1]
        return logits

    @abstractmethod
    def recompute(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Compute the whole text of `cache` again, including the token ids [B 1] with which it
        outgrows its rotation, and seal it again. Return the logits of that token [B V]."""

    def decode(self, ids: Tensor, cache: KVCache, captured: CapturedStep | None) -> Tensor:
        """Run one decode step for ids [B 1]. Return logits [B V]."""
        if self.attachment.rotary is not None:
            if cache.outgrows:
                return self.recompute(ids, cache)
            cache.note_text(ids)
        traced = self.tracer.step(cache) if self.tracer is not None else nullcontext()
        with traced, step_threads(self.model.device):
            return captured(ids) if captured is not None else self.run(ids, cache)

    def joined(self, caches: Sequence[KVCache]) -> KVCache:
        """Return the cache with which `caches` take a step together. If steps are captured, it is
        one of a fixed size, so that other sequences can use the captured step."""
        refused = self.traced or next((why for cache in caches if (why := capture_refusal(self.forward, cache))), None)
        sized = self.graphs is not None and refused is None
        if len(caches) == 1 and not sized:
            return caches[0]
        slots = SlotsCache(caches, self.traced, sized=sized)
        if len(caches) == 1:
            return caches[0] if slots.step_inputs is None else slots
        self.one_by_one = slots.alone
        return slots

    def captured(self, cache: KVCache) -> CapturedStep | None:
        """Return the captured step of a sealed cache, or None if its steps cannot be captured."""
        if self.graphs is None:
            return None
        reason = self.traced or capture_refusal(self.forward, cache)
        if reason is None:
            assert self.forward is not None
            return CapturedStep(self.forward, cache, self.graphs, self.kept)
        self.plain_steps = reason
        return None

    @property
    def traced(self) -> str | None:
        """Return why each layer runs by itself if steps are clocked, else None."""
        return "trace=on clocks each step's parts" if self.tracer is not None else None

    def close(self, captured: CapturedStep) -> None:
        """Stop using a captured step; its cache goes on without it."""
        captured.close()
        if captured.failure is not None:
            self.plain_steps, self.graphs = captured.failure, None  # one failure is enough
