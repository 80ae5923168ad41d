"""Steps sequences together that join and leave one by one (continuous batching)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.engine.batch.cache import SlotsCache
from harness.engine.batch.running_sequence import Generation, RunningSequence
from harness.engine.cache import KVCache
from harness.engine.graph import CapturedStep
from harness.engine.trace import medians
from harness.models.devices import read_later
from kernels.step_inputs import to_device


class RunningBatch:
    """Decode several sequences together, one token per step; they may join and leave at any time.
    Each has a cache of its own.

    Lengths, budgets, bytes and traffic are therefore counted per sequence, and each gets the tokens
    that it gets alone; in 16 bits, products of several sequences round otherwise. The model's
    products are computed together, and attention as well where the method allows it (`SlotsCache`).
    If a layer of one sequence cannot be captured, all of them run uncaptured.

    A token's time is when the host has it. The device keeps a copy, which the next step reads."""

    def __init__(self, engine: Any) -> None:
        """`engine`: the `Engine` that runs the forwards; it makes batches of its own for single answers."""
        self.engine = engine
        self.sequences: list[RunningSequence] = []
        self._together: list[RunningSequence] = []  # the sequences in `_cache` and `_captured`
        self._rows: list[int] = []  # rows of each of them
        self._cache: KVCache | None = None
        self._captured: CapturedStep | None = None
        # [B 1], tokens on the device that `_together` feed next, if all picked one
        self._next: Tensor | None = None
        # steps until a cache of `_together` must prepare for the next one (`KVCache.prepare`)
        self._alike: float = inf
        # logits of the step that runs already while the host reads a token
        self._ahead: Tensor | None = None

    @torch.inference_mode()
    def join(
        self,
        cache: KVCache,
        logits: Tensor | None,
        question: Tensor,
        *,
        began: float,
        **ending: Any,
    ) -> RunningSequence:
        """Add a prefilled sequence, or B sequences that share `cache`, and return it. logits [B V]:
        those of its last token. question [B Q]: tokens that are fed one by one after the seal
        (protocol=context, else Q = 0); with a question, logits may be None. `began`: when the
        prefill began, by `perf_counter`. `ending`: keywords of `RunningSequence`."""
        slot = RunningSequence(cache, question, began, **ending)
        slot.begin(logits)
        self.sequences.append(slot)
        return slot

    @torch.inference_mode()
    def step(self) -> list[RunningSequence]:
        """Decode one token for each sequence of the batch. Return the sequences whose answers ended
        with it; they have left the batch."""
        return self._step(ahead=False)

    @torch.inference_mode()
    def run(self) -> list[RunningSequence]:
        """Take steps until some answers end. Return their sequences; they have left the batch.

        The host reads token t of a captured step while step t + 1 runs, wherever token t cannot end
        an answer: before a rule's least number of tokens, and where no rule stops it. So no step is
        ever taken that is not needed, and tokens, bytes and records are those of `step`."""
        while not (ended := self._step(ahead=True)) and self.sequences:
            pass
        return ended

    def _step(self, ahead: bool) -> list[RunningSequence]:
        if running := [slot for slot in self.sequences if not slot.ended]:
            self._advance(running, ahead)
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
            out.fidelity = [
                watch.report(engine.model, i, tokens, exact) for i, tokens in enumerate(out.tokens)
            ]
        if engine.tracer is not None:
            out.trace = medians(slot.parts)
            out.measured["read_bytes_per_step"] = fmean(slot.read) if slot.read else None
        return out

    def abandon(self, slots: Sequence[RunningSequence]) -> None:
        """Drop the sequences `slots` after an error, whatever state their caches are in."""
        self.sequences = [slot for slot in self.sequences if slot not in slots]
        if any(slot in self._together for slot in slots):
            captured, self._captured, self._together, self._cache = self._captured, None, [], None
            self._next = self._ahead = None
            if captured is not None:
                captured.close()

    def _advance(self, running: list[RunningSequence], ahead: bool) -> None:
        """Take a step with the sequences `running`, or take over the one that runs already.
        `ahead`: launch the one after it, if it is certain to be needed, before the host waits for
        this one's tokens. Then all that other code reads of this step has been read, or copied on
        the device."""
        if not (running := self._recompute(running)):
            return
        for slot in running:
            slot.clock.resume()
        began, prepares = perf_counter(), running == self._together
        if not prepares or (self._ahead is None and not self._alike):
            self._gather(running)
        logits = self._decoded(self._tokens(running)) if self._ahead is None else self._ahead
        self._ahead = None
        capture_s = self._captured.take_capture_s() if self._captured is not None else None
        for number, slot in enumerate(running):
            if capture_s is not None:
                slot.captured(capture_s, counts=prepares)
            self._note_reads(number, slot)
        if prepares:
            capture_s = None  # a part of the step
        picking = [slot for slot in running if not slot.asking]
        picked = self._picked(running, logits)
        self._next = (
            picked[0].unsqueeze(1) if picked is not None and len(picking) == len(running) else None
        )
        read = read_later(picked) if picked is not None else lambda: [[], []]
        if (
            ahead
            and self._captured is not None
            and self._next is not None
            and self._alike
            and all(slot.goes_on for slot in running)
        ):
            self._ahead = self._decoded(self._next)
        ids, finite = map(deque, read())
        for slot in picking:
            slot.note(*([numbers.popleft() for _ in range(slot.rows)] for numbers in (ids, finite)))
        for slot in running:
            slot.clock.pause()
        seconds = perf_counter() - began - (capture_s or 0.0)
        tracer = self.engine.tracer
        for slot in running:
            slot.bill(seconds, capture_s, len(running))
            if tracer is not None:
                slot.parts.append(tracer.last)
                if (read_bytes := tracer.bytes_read(slot.cache)) is not None:
                    slot.read.append(read_bytes)

    def _tokens(self, running: Sequence[RunningSequence]) -> Tensor:
        """Return the tokens [B 1] that the sequences feed next, on the device."""
        fed = [slot.next() for slot in running]
        if self._next is not None:
            return self._next
        return torch.cat([to_device(token, self.engine.model.device) for token in fed])

    def _decoded(self, fed: Tensor) -> Tensor:
        """Take a step of the sequences that step together, with the tokens `fed` [B 1]. Return
        logits [B V]."""
        assert self._cache is not None
        try:
            logits = self.engine.decode(fed, self._cache, self._captured)
        except BaseException:
            self._part()  # each cache stays as it was before the step
            raise
        self._alike -= 1
        for slot, token, own in zip(
            self._together, fed.split(self._rows), logits.split(self._rows), strict=True
        ):
            slot.cache.note_step(token, own)
        return logits

    def _picked(self, running: Sequence[RunningSequence], logits: Tensor) -> Tensor | None:
        """Pick the next tokens from logits [B V], for the sequences that are no longer fed their
        question, as `RunningSequence.pick` does; None if there is no such sequence. Where all
        take the most likely tokens, a captured step has found them already."""
        likeliest = None if self._captured is None else self._captured.picked
        if likeliest is not None and all(slot.takes_likeliest for slot in running):
            return likeliest
        parts = [None] * len(running) if likeliest is None else likeliest.split(self._rows, 1)
        own = zip(running, logits.split(self._rows), parts, strict=True)
        picks = [pick for slot, rows, part in own if (pick := slot.pick(rows, part)) is not None]
        return torch.cat(picks, 1) if picks else None

    def _recompute(self, running: list[RunningSequence]) -> list[RunningSequence]:
        """Let each sequence take its step alone whose text becomes too long for the rotation of its
        stored keys (`KVCache.outgrows`): that step computes the whole text again. Return the other
        sequences."""
        rotary = self.engine.attachment.rotary
        if rotary is None or rotary.drops_at is None:
            return running
        assert self._ahead is None, "steps whose rotation depends on the length are not captured"
        for number, slot in enumerate(self._together):
            self._catch_up(number, slot)
        outgrowing = [slot for slot in running if slot.cache.outgrows]
        if outgrowing:
            self._part()
        for slot in outgrowing:
            slot.clock.resume()
            began, token = perf_counter(), to_device(slot.next(), self.engine.model.device)
            slot.take(self.engine.decode(token, slot.cache, None))
            slot.clock.pause()
            slot.bill(perf_counter() - began, None, 1)
        return [slot for slot in running if slot not in outgrowing]

    def _note_reads(self, number: int, slot: RunningSequence) -> None:
        """Count how many tokens the last step read for sequence number `number` of the batch.
        Caches that step together are updated only now and then (`SlotsCache.lags`), and some layers
        add up what they read. For them, counting waits until the union of what the heads read is due
        or a stretch of the answer ends; then all steps since the last time are counted."""
        if not isinstance(self._cache, SlotsCache):
            slot.behind += 1
            if not slot.adds_up or slot.is_due(slot.behind):
                self._catch_up(number, slot)
        elif slot.is_due(self._cache.behind(number)) or not self._cache.lags(number):
            self._catch_up(number, slot)

    def _catch_up(self, number: int, slot: RunningSequence) -> None:
        """Count in a sequence's own cache the steps that were counted for the whole batch at once,
        and note what was read since the last time."""
        cache = self._cache
        steps = cache.catch_up(number) if isinstance(cache, SlotsCache) else slot.behind
        slot.behind = 0
        slot.note_reads(steps)

    def _gather(self, running: list[RunningSequence]) -> None:
        """Make the joint cache with which the sequences `running` decode together, and get ready to
        capture its steps. It is called when other sequences took the step before, and when a cache
        must prepare for the next one, such as by letting rows go."""
        self._part()
        caches = [slot.cache for slot in running]
        for cache in caches:
            cache.prepare()
        self._together, self._rows = running, [slot.rows for slot in running]
        self._cache = self.engine.joined(caches)
        self._captured = self.engine.captured(self._cache)
        if self._captured is not None:
            self._alike = min(cache.steps_alike() for cache in caches)
        else:
            self._alike = self._cache.steps_alike() if isinstance(self._cache, SlotsCache) else inf

    def _part(self) -> None:
        if self._captured is not None:
            self._captured.close()
        for number, slot in enumerate(self._together):
            self._catch_up(number, slot)
        # so that nothing outlives its sequence
        self._together, self._cache, self._captured = [], None, None
        self._next = self._ahead = None
