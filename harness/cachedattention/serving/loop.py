"""One engine with slots under a trace of conversations: turns wait first come, first served, and run side by side.

A prefill halts the decoding of the others, or with `interleave` lets them make a step between two of its chunks. The
histories are told of every turn that waits, so that a policy can look ahead. The simulator's server
(harness/cachedattention/simulation/server.py) does the same with numbers in place of a model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.cachedattention.serving.figures import Answer
from harness.cachedattention.serving.trace import Session
from harness.cachedattention.serving.traffic import Clock
from harness.cachedattention.turns.caches import CachesBetweenTurns, Saved
from harness.cachedattention.turns.conversation import Conversation
from harness.engine.batch.generation import Stop
from harness.engine.batch.running import RunningBatch
from harness.engine.batch.running_sequence import RunningSequence
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.jobs.planning.items import Item
from harness.jobs.questions import Ending


class ServedConversation(Conversation):
    """A conversation of the trace, with the times of the turn that waits or runs."""

    def __init__(self, histories: CachesBetweenTurns, session: Session) -> None:
        super().__init__(histories, session.name, session.item.room, len(session.item.turns))
        self.think_s, self._items = session.think_s, session.item.turns
        self.arrived_s = self.started_s = 0.0  # on the loop's clock
        self.token_s: list[float] = []  # from the arrival of the question

    @property
    def question(self) -> Item:
        """The turn that is asked next."""
        return self._items[self.asked]


class Loop:
    """`ending`: how tokens of a turn are picked, and when it stops. `slots`: turns that run side by side."""

    def __init__(
        self,
        engine: Engine,
        histories: CachesBetweenTurns,
        clock: Clock,
        *,
        ending: Ending,
        slots: int,
        interleave: bool = False,
    ) -> None:
        self.engine, self.histories, self.clock = engine, histories, clock
        self.ending, self.slots, self.interleave = ending, slots, interleave
        self._batch = RunningBatch(engine)
        self._order = count()  # of questions that come at the same moment
        self._running: dict[RunningSequence, ServedConversation] = {}
        self._waiting: deque[ServedConversation] = deque()
        self._next: ServedConversation | None = None  # the first of them, once its history is loaded ahead
        self._ended: deque[tuple[Answer, Saved]] = deque()

    def serve(self, sessions: Sequence[Session]) -> Iterator[Answer]:
        """The answers in the order in which they end."""
        self._coming = [(one.start_s, next(self._order), ServedConversation(self.histories, one)) for one in sessions]
        heapify(self._coming)
        self.clock.start()
        while self._coming or self._waiting or self._running:
            self._arrivals()
            if self._waiting and len(self._running) < self.slots:
                self._start(self._waiting.popleft())
            elif self._running:
                self._look_ahead()
                self._step()
            else:
                self.clock.wait_until(self._coming[0][0])
            yield from self._told()
        yield from self._told(wait=True)

    def _told(self, wait: bool = False) -> Iterator[Answer]:
        """Those whose histories have left the device."""
        while self._ended and (wait or self._ended[0][1].finished):
            answer, saved = self._ended.popleft()
            yield replace(answer, save_hidden_s=saved.hidden_s())

    def _arrivals(self) -> None:
        while self._coming and self._coming[0][0] <= self.clock.now():
            at, _, visit = heappop(self._coming)
            visit.arrived_s = at
            self._waiting.append(visit)
            self.histories.enqueue(visit.session)
            self.histories.prefetch()

    def _look_ahead(self) -> None:
        """The turn that is the next to get a slot may load the first layers of its history."""
        if self._waiting and self._waiting[0] is not self._next:
            self._next = self._waiting[0]
            self._next.ahead(self._next.question.prompt.ids)

    def _start(self, visit: ServedConversation) -> None:
        """A slot is free: what is stored of the history comes into a cache, the rest is computed."""
        visit.started_s, visit.token_s, self._next = self.clock.now(), [], None
        self.histories.dequeue(visit.session)
        turn = visit.question
        visit.ask(turn.prompt.ids)
        visit.resume()
        self.histories.prefetch()
        self._join(visit, visit.compute(self._prefill), self._clocked(self.ending(turn), visit))

    def _prefill(self, cache: KVCache, tokens: Sequence[int]) -> Tensor:
        """-> logits of the last token [1 V]"""
        return self.engine.prefill(cache, self._tensor(tokens), whole=True, between=self._let_others_step)

    def _let_others_step(self) -> None:
        if self.interleave and self._running:
            self._step()

    def _join(self, visit: ServedConversation, logits: Tensor | None, ending: dict[str, Any]) -> None:
        cache, nothing = visit.found.cache, self._tensor(visit.unread)
        slot = self._batch.join(cache, logits, nothing, began=perf_counter(), decoded=visit.decoded, **ending)
        if slot.ended:  # by its first token
            self._batch.leave(slot)
            self._finish(slot, visit)
        else:
            self._running[slot] = visit

    def _clocked(self, ending: dict[str, Any], visit: ServedConversation) -> dict[str, Any]:
        """A stop is asked as soon as a token is on the host."""
        [stop] = ending["stops"]

        def noting(tokens: list[int]) -> str | None:
            visit.token_s.append(self.clock.now() - visit.arrived_s)
            reason: str | None = stop(tokens)
            return reason

        stops: list[Stop] = [noting]
        return {**ending, "stops": stops}

    def _step(self) -> None:
        ended = self._batch.step()
        self._arrivals()  # before anything is saved: a policy looks ahead at who waits
        for slot in ended:
            self._finish(slot, self._running.pop(slot))

    def _finish(self, slot: RunningSequence, visit: ServedConversation) -> None:
        """Its history goes back, and its next question comes once the user has thought."""
        ended_s, found, [said], [stop] = self.clock.now(), visit.found, slot.out.tokens, slot.out.stops
        visit.answered(said, stop)
        saved = visit.save()
        answer = Answer(
            session=visit.session,
            turn=visit.asked,
            arrived_s=visit.arrived_s,
            queue_s=visit.started_s - visit.arrived_s,
            load_s=found.load_s,
            hidden_s=found.hidden_s,
            token_s=visit.token_s,
            save_ahead_s=visit.save_ahead_s,
            save_s=self.clock.now() - ended_s,
            tier=found.tier,
            lost_to=found.lost,
            reused_tokens=found.reused,
            new_tokens=visit.new_tokens,
            tokens=said,
            stop=stop,
        )
        self._ended.append((answer, saved))
        if not visit.over:
            heappush(self._coming, (ended_s + visit.think_s[visit.asked - 1], next(self._order), visit))

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], dtype=torch.long, device=self.engine.model.device)
