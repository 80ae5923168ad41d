"""One engine with slots under a trace of conversations: turns wait first come, first served, and run side by side.

A prefill halts the decoding of the others, or with `interleave` lets them make a step between two of its chunks. The
histories are told of every turn that waits, so that a policy can look ahead. The simulator's server
(harness/history/simulation/server.py) does the same with numbers in place of a model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.conversations.histories import Histories, Resumed, Saved
from harness.engine.batch.generation import Stop
from harness.engine.batch.running import RunningBatch
from harness.engine.batch.slot import Slot
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.jobs.planning.items import Item
from harness.jobs.questions import Ending
from harness.serve.answer import Answer
from harness.serve.clock import Clock
from harness.serve.trace import Session


@dataclass(slots=True)
class Talk:
    """A conversation on its way. `tokens`: all that was said, by both, behind the turns that are over."""

    session: Session
    turn: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def item(self) -> Item:
        """Its next turn."""
        return self.session.item.turns[self.turn]


@dataclass(slots=True)
class Running:
    """A turn in a slot."""

    talk: Talk
    arrived_s: float
    started_s: float
    found: Resumed
    save_ahead_s: float
    token_s: list[float] = field(default_factory=list)


class Loop:
    """`ending`: how tokens of a turn are picked, and when it stops. `slots`: turns that run side by side."""

    def __init__(
        self,
        engine: Engine,
        histories: Histories,
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
        self._running: dict[Slot, Running] = {}
        self._waiting: deque[tuple[float, Talk]] = deque()  # with the time of arrival
        self._next: Talk | None = None  # the first of them, once its history is loaded ahead
        self._ended: deque[tuple[Answer, Saved]] = deque()

    def serve(self, sessions: Sequence[Session]) -> Iterator[Answer]:
        """The answers in the order in which they end."""
        self._coming = [(one.start_s, next(self._order), Talk(one)) for one in sessions]
        heapify(self._coming)
        self.clock.start()
        while self._coming or self._waiting or self._running:
            self._arrivals()
            if self._waiting and len(self._running) < self.slots:
                self._start(*self._waiting.popleft())
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
            at, _, talk = heappop(self._coming)
            self._waiting.append((at, talk))
            self.histories.enqueue(talk.session.name)
            self.histories.prefetch()

    def _look_ahead(self) -> None:
        """The turn that is the next to get a slot may load the first layers of its history."""
        if self._waiting and self._waiting[0][1] is not self._next:
            self._next = self._waiting[0][1]
            text = [*self._next.tokens, *self._next.item.prompt.ids]
            self.histories.ahead(self._next.session.name, text[:-1])

    def _start(self, arrived_s: float, talk: Talk) -> None:
        """A slot is free: what is stored of the history comes into a cache, the rest is computed."""
        started_s, name, self._next = self.clock.now(), talk.session.name, None
        self.histories.dequeue(name)
        talk.tokens += talk.item.prompt.ids
        found = self.histories.resume(name, talk.tokens[:-1], talk.session.item.room)
        self.histories.prefetch()
        found, logits = self.histories.compute(found, talk.tokens, self._prefill)
        ahead_s = self.histories.save_ahead(name, talk.tokens, found.cache)
        running = Running(talk, arrived_s, started_s, found, ahead_s)
        self._join(running, logits)

    def _prefill(self, cache: KVCache, tokens: Sequence[int]) -> Tensor:
        """-> logits of the last token [1 V]"""
        ids = self._tensor(tokens)
        for place, chunk in enumerate(ids.split(self.engine.prefill_chunk or ids.shape[1], dim=1)):
            if place and self.interleave and self._running:
                self._step()
            logits = self.engine.prefill(cache, chunk)
        return logits

    def _join(self, running: Running, logits: Tensor | None) -> None:
        asked = self._clocked(self.ending(running.talk.item), running)
        slot = self._batch.join(running.found.cache, logits, self._tensor([]), began=perf_counter(), **asked)
        if slot.ended:  # by its first token
            self._batch.leave(slot)
            self._finish(slot, running)
        else:
            self._running[slot] = running

    def _clocked(self, ending: dict[str, Any], running: Running) -> dict[str, Any]:
        """A stop is asked as soon as a token is on the host."""
        [stop] = ending["stops"]

        def noting(tokens: list[int]) -> str | None:
            running.token_s.append(self.clock.now() - running.arrived_s)
            reason: str | None = stop(tokens)
            return reason

        stops: list[Stop] = [noting]
        return {**ending, "stops": stops}

    def _step(self) -> None:
        ended = self._batch.step()
        self._arrivals()  # before anything is saved: a policy looks ahead at who waits
        for slot in ended:
            self._finish(slot, self._running.pop(slot))

    def _finish(self, slot: Slot, running: Running) -> None:
        """Its history goes back, and its next question comes once the user has thought."""
        talk, [said], [stop] = running.talk, slot.out.tokens, slot.out.stops
        ended_s = self.clock.now()
        talk.tokens += said[: len(said) - (stop == "eos")]  # which gives way to the template's end of a turn
        cache = running.found.cache
        saved = self.histories.save(talk.session.name, talk.tokens[: cache.num_tokens], cache)
        answer = self._answer(running, said, stop, self.clock.now() - ended_s)
        self._ended.append((answer, saved))
        talk.turn += 1
        if talk.turn < len(talk.session.item.turns):
            again_s = ended_s + talk.session.think_s[talk.turn - 1]
            heappush(self._coming, (again_s, next(self._order), talk))

    def _answer(self, running: Running, said: list[int], stop: str, save_s: float) -> Answer:
        talk, found = running.talk, running.found
        prompt = len(talk.tokens) - len(said) + (stop == "eos")
        return Answer(
            session=talk.session.name,
            turn=talk.turn + 1,
            arrived_s=running.arrived_s,
            queue_s=running.started_s - running.arrived_s,
            load_s=found.load_s,
            hidden_s=found.hidden_s,
            token_s=running.token_s,
            save_ahead_s=running.save_ahead_s,
            save_s=save_s,
            tier=found.tier,
            lost_to=found.lost,
            reused_tokens=found.reused,
            new_tokens=prompt - found.reused,
            tokens=said,
            stop=stop,
        )

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], dtype=torch.long, device=self.engine.model.device)
