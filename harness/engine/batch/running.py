"""Steps sequences together that join and leave one by one (continuous batching)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.engine.batch.cache import SlotsCache
from harness.engine.batch.running_sequence import Generation, RunningSequence, Stop, never
from harness.engine.cache import KVCache
from harness.engine.graph import CapturedStep
from harness.engine.sampling import Greedy, Sampler


class RunningBatch:
    """Decode several sequences together, one token per step; they may join and leave at any time.
    Each has a cache of its own.

    Lengths, budgets, bytes and traffic are therefore counted per sequence, and each gets the tokens
    that it gets alone. The model's products are computed together, and attention as well where the
    method allows it (`SlotsCache`). If a layer of one sequence cannot be captured, all of them run
    uncaptured."""

    def __init__(self, engine: Any) -> None:
        """`engine`: the `Engine` that runs the forwards; it makes batches of its own for single answers."""
        self.engine = engine
        self.sequences: list[RunningSequence] = []
        self._together: list[RunningSequence] = []  # the sequences in `_cache` and `_captured`
        self._rows: list[int] = []  # rows of each of them
        self._cache: KVCache | None = None
        self._captured: CapturedStep | None = None

    @torch.inference_mode()
    def join(
        self,
        cache: KVCache,
        logits: Tensor | None,
        question: Tensor,
        *,
        began: float,
        max_new_tokens: int,
        stops: Sequence[Stop] | None = None,
        sampler: Sampler | None = None,
    ) -> RunningSequence:
        """Add a prefilled sequence, or B sequences that share `cache`, and return it. logits [B V]:
        those of its last token. question [B Q]: tokens that are fed one by one after the seal
        (protocol=context, else Q = 0); with a question, logits may be None. `began`: when the
        prefill began, by `perf_counter`."""
        stops = list(stops or [never] * len(question))
        slot = RunningSequence(cache, question, stops, sampler or Greedy(), max_new_tokens, began)
        slot.begin(logits)
        self.sequences.append(slot)
        return slot

    @torch.inference_mode()
    def step(self) -> list[RunningSequence]:
        """Decode one token for each sequence of the batch. Return the sequences whose answers ended
        with it; they have left the batch."""
        if running := [slot for slot in self.sequences if not slot.ended]:
            self._advance(running)
        ended = [slot for slot in self.sequences if slot.ended]
        for slot in ended:
            self.leave(slot)
        return ended

    @torch.inference_mode()
    def leave(self, slot: RunningSequence) -> Generation:
        """Take a sequence out of the batch, whether or not its answer has ended, and return the
        answer so far with its measurements. Its cache can be used elsewhere."""
        self.sequences.remove(slot)
        if slot in self._together:
            self._part()
        slot.finish()
        out, watch, engine = slot.out, slot.cache.watch, self.engine
        engine.unclocked = out.unclocked or engine.unclocked
        if watch is not None:
            exact = engine.attachment.method.dense_prefill  # else Full's prompt is not the method's
            out.fidelity = [watch.report(engine.model, i, tokens, exact) for i, tokens in enumerate(out.tokens)]
        if engine.tracer is not None:
            out.trace = engine.tracer.medians(slot.parts)
            out.measured["read_bytes_per_step"] = fmean(slot.read) if slot.read else None
        return out

    def abandon(self, slots: Sequence[RunningSequence]) -> None:
        """Drop the sequences `slots` after an error, whatever state their caches are in."""
        self.sequences = [slot for slot in self.sequences if slot not in slots]
        if any(slot in self._together for slot in slots):
            captured, self._captured, self._together, self._cache = self._captured, None, [], None
            if captured is not None:
                self.engine.close(captured)

    def _advance(self, running: list[RunningSequence]) -> None:
        if not (running := self._recompute(running)):
            return
        for slot in running:
            slot.clock.resume()
        began = perf_counter()
        if running != self._together:
            self._gather(running)
        assert self._cache is not None
        fed = [slot.next().to(self.engine.model.device) for slot in running]
        try:
            logits = self.engine.decode(fed[0] if len(fed) == 1 else torch.cat(fed), self._cache, self._captured)
        except BaseException:
            self._part()  # each cache stays as it was before the step
            raise
        capture_s = self._captured.take_capture_s() if self._captured is not None else None
        for number, (slot, token, own) in enumerate(zip(running, fed, logits.split(self._rows), strict=True)):
            if capture_s is not None:
                slot.captured(capture_s)
            self._note_reads(number, slot)
            slot.advance(token, own)
            slot.clock.pause()
        self._note(running, perf_counter() - began, capture_s)

    def _recompute(self, running: list[RunningSequence]) -> list[RunningSequence]:
        """Let each sequence take its step alone whose text becomes too long for the rotation of its
        stored keys (`KVCache.outgrows`): that step computes the whole text again. Return the other
        sequences."""
        rotary = self.engine.attachment.rotary
        if rotary is None or rotary.drops_at is None:
            return running
        for number, slot in enumerate(self._together):
            self._catch_up(number, slot)
        outgrowing = [slot for slot in running if slot.cache.outgrows]
        if outgrowing:
            self._part()
        for slot in outgrowing:
            slot.clock.resume()
            began, token = perf_counter(), slot.next().to(self.engine.model.device)
            slot.take(self.engine.decode(token, slot.cache, None))
            slot.clock.pause()
            slot.bill(perf_counter() - began, None, 1)
        return [slot for slot in running if slot not in outgrowing]

    def _note_reads(self, number: int, slot: RunningSequence) -> None:
        """Count how many tokens the last step read for sequence number `number` of the batch.
        Caches that step together are updated only now and then (`SlotsCache.lags`): for them this
        waits until the union of what the heads read is due, and then counts all steps since the
        last time."""
        if not isinstance(self._cache, SlotsCache):
            slot.note_reads(1)
        elif slot.counts_union(self._cache.behind(number)) or not self._cache.lags(number):
            self._catch_up(number, slot)

    def _catch_up(self, number: int, slot: RunningSequence) -> None:
        """Count in a sequence's own cache the steps that were counted for the whole batch at once,
        and note what they read; a cache that steps alone is up to date already."""
        if isinstance(self._cache, SlotsCache):
            slot.note_reads(self._cache.catch_up(number))

    def _note(self, running: list[RunningSequence], seconds: float, capture_s: float | None) -> None:
        tracer = self.engine.tracer
        for slot in running:
            slot.bill(seconds - (capture_s or 0.0), capture_s, len(running))
            if tracer is None:
                continue
            if (read := tracer.bytes_read(slot.cache)) is not None:
                slot.read.append(read)
            if tracer.last is not None:
                slot.parts.append(tracer.last)

    def _gather(self, running: list[RunningSequence]) -> None:
        """Make the joint cache with which the sequences `running` decode together, and get ready to
        capture its steps. It is called when other sequences took the step before."""
        self._part()
        caches = [slot.cache for slot in running]
        self._together, self._rows = running, [slot.rows for slot in running]
        self._cache = self.engine.joined(caches)
        self._captured = self.engine.captured(self._cache)

    def _part(self) -> None:
        if self._captured is not None:
            self.engine.close(self._captured)
        for number, slot in enumerate(self._together):
            self._catch_up(number, slot)
        self._together, self._cache, self._captured = [], None, None  # so that nothing outlives its sequence
