"""Asks, on one cache, what belongs together: the turns of a conversation, and under
questions=shared the examples that have the same context."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.config.errors import breaks_device, is_memory
from harness.engine.batch.running import RunningBatch
from harness.engine.batch.running_sequence import Generation, RunningSequence, seal
from harness.engine.cache import KVCache
from harness.engine.engine import Engine, NotFiniteError
from harness.engine.graph import CaptureBroke
from harness.engine.saved_state import Snapshot
from harness.jobs.examples import PreparedExample
from harness.jobs.facts import PEAKS
from harness.jobs.histories import Histories
from harness.jobs.likelihood import Likelihood, Unmeasured, references
from harness.jobs.prefill import Prefilled, Usage
from harness.models.devices import wait_for
from harness.results.fact import largest
from harness.results.records import RecordError, StoreError
from kernels.dispatch import BackendError
from methods.layers.returned import ReturnedError

# how tokens are picked for a turn, and when it stops
Ending = Callable[[PreparedExample], dict[str, Any]]


@dataclass
class Transcript:
    """Holds the answers of one example, turn by turn, with the memory and backends that its
    prefills and its decode steps used."""

    item: PreparedExample
    prefill: Usage
    decode: Usage
    turns: list[Generation] = field(default_factory=list)
    # of each turn: what is known of its history, by key
    histories: list[dict[str, Any]] = field(default_factory=list)
    # where texts were fed behind the prompt: of each
    choices: list[Generation] = field(default_factory=list)
    prefilled_by: str | None = None  # id of the example whose prefill and seal it used

    @property
    def facts(self) -> dict[str, Any]:
        """The values that a record holds of the example's run, by key (harness/jobs/facts.py). Peaks of memory are the
        whole process's, so sequences that run at the same time are included."""
        prefill, decode, compared = self.prefill, self.decode, self.turns[0].fidelity
        peaks = (prefill.device_bytes, prefill.host_bytes, decode.device_bytes, decode.host_bytes)
        return {
            "device_peak_bytes": largest([prefill.device_bytes, decode.device_bytes]),
            "host_peak_bytes": largest([prefill.host_bytes, decode.host_bytes]),
            "peaks": dict(zip(PEAKS, peaks, strict=True)),
            "prefilled_by": self.prefilled_by,
            "fidelity": compared[0] if compared else None,
        }


@dataclass(frozen=True, slots=True)
class Failed:
    """An example that got no answer, with its error. Constructing one raises the error instead if
    it would hit every other example as well (`refuse_to_go_on`)."""

    item: PreparedExample
    error: Exception

    def __post_init__(self) -> None:
        refuse_to_go_on(self.error)
        let_go(self.error)


def let_go(error: BaseException | None) -> None:
    """Clear the frames in the tracebacks of an error and of its causes, because they keep caches
    alive. Frames that are still running are cut out of the traceback."""
    while error is not None:
        place = error.__traceback__
        while place is not None:
            try:
                place.tb_frame.clear()
            except RuntimeError:  # it runs
                error.__traceback__ = place.tb_next
            place = place.tb_next
        error = error.__cause__ or error.__context__


def refuse_to_go_on(error: Exception) -> None:
    """Raise `error` if other examples would fail the same way, so that the run must end: for a
    device in a broken state, a full disk, a results folder that cannot be written, a backend that
    was asked for and refuses, or a method that returns something wrong. Memory that ran out is one
    example's error, because a shorter example may fit; so is a record that cannot be written."""
    kinds = (OSError, StoreError, BackendError, CaptureBroke, ReturnedError)
    if is_memory(error) or isinstance(error, RecordError):
        return
    if isinstance(error, kinds) or breaks_device(error):
        raise error


class SealedContext:
    """A context that is prefilled and sealed once, for several questions. (At the seal, the method
    reduces or indexes the cache.)

    After each answer the cache is put back to its state after the seal. So a question sees nothing
    of those before it, and gets the answer that it would get alone under protocol=context. The
    first question's clock includes the prefill, a later one's begins with the question; copying and
    restoring the cache is not timed.
    """

    @torch.inference_mode()
    def __init__(self, cache: KVCache, began: float) -> None:
        """Seal `cache` and keep a copy of its state. `began`: the clock's time when its prefill
        began."""
        self.cache, self._device = cache, cache.state.request.device
        self.seal_s = seal(cache)
        before = perf_counter()
        self.snapshot = Snapshot(cache)
        wait_for(self._device)
        self._began: float | None = began + perf_counter() - before

    def begin(self) -> float:
        """Put the cache back to its state after the seal, and return the time at which the next
        question's clock began: for the first question when the prefill did, for later ones now."""
        if self._began is not None:
            began, self._began = self._began, None
            return began
        self.snapshot.restore()
        wait_for(self._device)
        return perf_counter()


class ContextSession:
    """Examples with the same context, asked one after the other on one cache. The cache is one
    sequence of a running batch: call `next` to start a turn, let the batch step until the turn
    ends, give its answer to `ended`, and call `next` again."""

    def __init__(
        self,
        engine: Engine,
        histories: Histories,
        items: Sequence[PreparedExample],
        prefilled: Prefilled,
        context: int | None,
        ending: Ending,
        likelihood: Likelihood | None,
    ) -> None:
        """`prefilled`: the filled cache of the first item's prompt, or of its first `context`
        tokens. `ending`: returns, for a turn, how tokens are picked and when it stops. `likelihood`:
        measures right answers; None to skip that."""
        self.engine, self.histories, self.ending = engine, histories, ending
        self.likelihood = likelihood
        self._prefilled: Prefilled | None = prefilled  # until the last example begins
        self._context, self._waiting = context, deque(items)
        self._first, self._several = items[0].example.id, len(items) > 1
        self._shared: SealedContext | None = None  # once the first of several is asked
        self._turns = deque[PreparedExample]()  # of the example that is asked, those to come
        # before an answer begins, where the likelihood of right ones is to be measured
        self.unmeasured: Unmeasured | None = None
        # the cache before the answer, where a given reply takes its place
        self._unanswered: Snapshot | None = None
        self.asked = items[0]  # the example that is asked, or was last
        self.talk: Any  # a conversation
        self.transcript: Transcript

    @property
    def answered(self) -> bool:
        """Return True if all turns of the current example have been answered."""
        return bool(self.talk.over)

    @property
    def waiting(self) -> list[PreparedExample]:
        """The examples with this context that have not been asked yet."""
        return list(self._waiting)

    def next(self, batch: RunningBatch) -> RunningSequence | None:
        """Start the next turn, or the next example's first, in `batch`; return None if none is
        left."""
        if self._turns:
            return self._turn(batch, self._turns.popleft())
        if not self._waiting:
            return None
        self.asked = self._waiting.popleft()
        return self._question(batch, self.asked)

    def give_up(self) -> None:
        """Drop the stored conversation of the current example, which failed."""
        self.histories.forget(self.asked.example.id)

    @torch.inference_mode()
    def ended(self, made: Generation) -> None:
        """Take in the answer of a turn that has ended, and save the cache for the next turn. If the
        task dictates the reply that the next turn builds on, the model's own answer is recorded,
        and its tokens are removed from the cache. Raise `NotFiniteError` for an answer from logits
        that are not finite."""
        if made.not_finite is not None:
            raise self._not_finite(made.tokens[0], made.not_finite)
        self.transcript.turns.append(made)
        if self._unanswered is not None:
            self._unanswered.restore()
            self._unanswered = None
            wait_for(self.engine.model.device)
        if not (self._turns and self._turns[0].prompt.replaces_answer):
            self.talk.answered(made.tokens[0], made.stops[0])
        made.share_s += self.talk.save().save_s

    def _question(self, batch: RunningBatch, item: PreparedExample) -> RunningSequence:
        """Start the first turn of an example on the prefilled cache."""
        ready, later = self._prefilled, self._first if item.example.id != self._first else None
        assert ready is not None
        if not self._waiting:
            self._prefilled = None
        with Usage(self.engine.model.device) as usage:
            if self._several and later is None:
                self._shared = SealedContext(ready.cache, ready.began)
            began = ready.began if self._shared is None else self._shared.begin()
            by_token, turns = self._context is not None, len(item.turns)
            self.talk = self.histories.talk(
                item.example.id, ready.cache.capacity, turns, by_token=by_token
            )
            self.talk.ask(item.prompt.ids, item.new_tokens)
            self.talk.begin(ready.cache)
            slot = self._join(batch, item, ready.logits, began)
        if self._shared is not None and later is None:
            slot.out.seal_s = self._shared.seal_s
        prefill = ready.usage if later is None else Usage(self.engine.model.device)
        self.transcript = Transcript(item, prefill, usage, prefilled_by=later)
        self._turns.extend(item.further)
        self.transcript.histories.append(self.talk.facts)
        return self._before_the_answer(slot, item)

    def _turn(self, batch: RunningBatch, turn: PreparedExample) -> RunningSequence:
        """Start a further turn of a conversation: get its cache back, prefill what is missing, and
        seal it. Under protocol=context, a cache that stayed in memory is not sealed anew; the
        turn's tokens are fed one by one."""
        began, talk = perf_counter(), self.talk
        with Usage(self.engine.model.device) as usage:
            talk.ask(turn.prompt.ids, turn.new_tokens)
            talk.resume()
            slot = self._join(batch, turn, talk.compute(self._prefill), began)
        slot.out.recomputed += talk.found.outgrown
        talk.await_saved()
        self.transcript.prefill.add(usage)
        self.transcript.histories.append(talk.facts)
        return self._before_the_answer(slot, turn)

    def _join(
        self, batch: RunningBatch, turn: PreparedExample, logits: Tensor | None, began: float
    ) -> RunningSequence:
        cache, unread = self.talk.found.cache, self._tensor(self.talk.unread)
        cache.state.draw_for(self.asked.example.id)
        return batch.join(cache, logits, unread, began=began, **self.ending(turn))

    @torch.inference_mode()
    def _before_the_answer(self, slot: RunningSequence, turn: PreparedExample) -> RunningSequence:
        """Keep a copy of the cache before the answer begins, if right answers are to be measured on it
        (`measured`) or the task dictates the reply (`ended`). Return `slot`, the turn's sequence. The
        time of both is left out of the turn's measured times. An answer of one token ends before the
        seal, so neither is done for it."""
        measured = self.likelihood if not slot.ended else None
        right = references(turn, measured.tokenizer) if measured else []
        replaced = bool(self._turns) and self._turns[0].prompt.replaces_answer and not slot.ended
        if replaced or right:
            snapshot = Snapshot(slot.cache)
            if right:
                before = (*self.talk.unread, *(turn.thought.empty if turn.thought else ()))
                self.unmeasured = Unmeasured(slot, snapshot, before, right)
            self._unanswered = snapshot if replaced else None
            wait_for(self.engine.model.device)
        return slot

    def measured(self, costs: Sequence[float | None]) -> None:
        """Take in what each right answer to the turn that begins costs (`Likelihood.measure`); the most
        likely one counts. Raise `NotFiniteError` for a cost that is not finite."""
        one, self.unmeasured = self.unmeasured, None
        assert one is not None
        for reference, cost in zip(one.references, costs, strict=False):
            if cost is not None and not isfinite(cost):
                raise self._not_finite(reference, len(reference) - 1)
        known = (cost for cost in costs if cost is not None)
        one.slot.out.measured["answer_nll"] = min(known, default=None)

    def _not_finite(self, answer: Sequence[int], token: int) -> NotFiniteError:
        return self.engine.not_finite(self._tensor(self.talk.text), [answer], token, self._context)

    def _prefill(self, cache: KVCache, tokens: Sequence[int]) -> Tensor:
        return self.engine.prefill(cache, self._tensor(tokens), whole=True)

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([ids], dtype=torch.long, device=self.engine.model.device)
