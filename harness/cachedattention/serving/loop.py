"""A serving loop: one engine with slots answers conversations that arrive in real time. Turns wait
in order of arrival and run side by side, one per slot.

A prefill halts the decoding of the others. What keeps caches between turns learns of every turn
that waits, so that a policy can look ahead. The simulator's server (simulation/server.py) does the
same with numbers in place of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count
from time import perf_counter

import torch
from torch import Tensor

from harness.cachedattention.serving.figures import Answer
from harness.cachedattention.serving.plan import Session
from harness.cachedattention.turns.caches import CachesBetweenTurns, Saved
from harness.cachedattention.turns.conversation import Conversation
from harness.engine.batch.running import RunningBatch
from harness.engine.batch.running_sequence import RunningSequence, Stop
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.jobs.examples import PreparedExample
from harness.jobs.questions import Ending


class Clock:
    """A clock that runs from 0 at `start`, for a serving loop. `source` gives seconds; `sleep` lets
    them pass while there is nothing to do, and without it the clock is set forward instead."""

    def __init__(
        self,
        source: Callable[[], float] = perf_counter,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self._source, self._sleep = source, sleep
        self.start()

    def start(self) -> None:
        self._began = self._source()
        self.idle_s = 0.0  # of the seconds since, in which there was nothing to do

    def now(self) -> float:
        return self._source() - self._began

    def wait_until(self, at_s: float) -> None:
        before = self.now()
        if before >= at_s:
            return
        if self._sleep:
            self._sleep(at_s - before)
        else:
            self._began -= at_s - before
        self.idle_s += self.now() - before


class ServedConversation(Conversation):
    """A conversation that is served, with the seconds its user thinks before each question and the
    times of its current turn."""

    def __init__(self, caches: CachesBetweenTurns, session: Session) -> None:
        super().__init__(caches, session.name, session.item.room, len(session.item.turns))
        self.think_s, self._items = session.think_s, session.item.turns
        self.arrived_s = self.started_s = 0.0  # on the loop's clock
        self.token_s: list[float] = []  # from the arrival of the question

    @property
    def question(self) -> PreparedExample:
        """Return the turn of the user that is asked next."""
        return self._items[self.asked]


class ServingLoop:
    """A loop that serves conversations: it takes in questions as they arrive, starts turns in free
    slots, and decodes one token of all running turns per step. `ending` says for a turn how tokens
    are picked and when it stops; `slots`: how many turns run side by side."""

    def __init__(
        self,
        engine: Engine,
        caches: CachesBetweenTurns,
        clock: Clock,
        *,
        ending: Ending,
        slots: int,
    ) -> None:
        self.engine, self.caches, self.clock = engine, caches, clock
        self.ending, self.slots = ending, slots
        self._batch = RunningBatch(engine)
        self._order = count()  # of questions that come at the same moment
        self._running: dict[RunningSequence, ServedConversation] = {}
        self._waiting: deque[ServedConversation] = deque()
        # the first of them, once its history is loaded ahead
        self._next: ServedConversation | None = None
        self._ended: deque[tuple[Answer, Saved]] = deque()

    def serve(self, sessions: Sequence[Session]) -> Iterator[Answer]:
        """Serve all turns of the sessions (conversations with times of arrival). Yield the record
        of each turn, in the order in which they end."""
        self._coming = [
            (session.start_s, next(self._order), ServedConversation(self.caches, session))
            for session in sessions
        ]
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
            yield from self._complete_answers()
        yield from self._complete_answers(wait=True)

    def _complete_answers(self, wait: bool = False) -> Iterator[Answer]:
        """Yield the records of ended turns once their keys and values have left the device, because
        their times are complete only then. With `wait`, wait for all of them."""
        while self._ended and (wait or self._ended[0][1].finished):
            answer, saved = self._ended.popleft()
            yield replace(answer, save_hidden_s=saved.hidden_s())

    def _arrivals(self) -> None:
        while self._coming and self._coming[0][0] <= self.clock.now():
            at, _, talk = heappop(self._coming)
            talk.arrived_s = at
            self._waiting.append(talk)
            self.caches.enqueue(talk.session)
            self.caches.prefetch()

    def _look_ahead(self) -> None:
        """Begin to load the first layers of the history of the turn that gets the next free
        slot."""
        if self._waiting and self._waiting[0] is not self._next:
            self._next = self._waiting[0]
            self._next.ahead(self._next.question.prompt.ids)

    def _start(self, talk: ServedConversation) -> None:
        """Give the conversation's turn a free slot: load what is stored of its history, compute the
        rest of its prompt, and let it join the turns that decode."""
        talk.started_s, talk.token_s, self._next = self.clock.now(), [], None
        self.caches.dequeue(talk.session)
        turn = talk.question
        talk.ask(turn.prompt.ids)
        talk.resume()
        self.caches.prefetch()
        logits, ending = talk.compute(self._prefill), self.ending(turn)
        [stop] = ending["stops"]

        # a stop is asked as soon as a token is on the host
        def noting(tokens: list[int]) -> str | None:
            talk.token_s.append(self.clock.now() - talk.arrived_s)
            reason: str | None = stop(tokens)
            return reason

        stops: list[Stop] = [noting]
        cache, unread = talk.found.cache, self._tensor(talk.unread)
        ending |= {"stops": stops}
        slot = self._batch.join(cache, logits, unread, began=perf_counter(), **ending)
        if slot.ended:  # by its first token
            self._batch.leave(slot)
            self._finish(slot, talk)
        else:
            self._running[slot] = talk

    def _prefill(self, cache: KVCache, tokens: Sequence[int]) -> Tensor:
        """Prefill `tokens` into the cache; return the logits of the last one, [1 V]."""
        return self.engine.prefill(cache, self._tensor(tokens), whole=True)

    def _step(self) -> None:
        ended = self._batch.step()
        self._arrivals()  # before anything is saved: a policy looks ahead at who waits
        for slot in ended:
            self._finish(slot, self._running.pop(slot))

    def _finish(self, slot: RunningSequence, talk: ServedConversation) -> None:
        """End a conversation's turn: save its cache, record its times, and plan its next question
        for when the user has thought. Raise `NotFiniteError` for an answer from logits that are not
        finite."""
        ended_s, found, [tokens], [stop] = (
            self.clock.now(),
            talk.found,
            slot.out.tokens,
            slot.out.stops,
        )
        if slot.out.not_finite is not None:
            raise self.engine.not_finite(self._tensor(talk.text), [tokens], slot.out.not_finite)
        talk.answered(tokens, stop)
        saved = talk.save()
        answer = Answer(
            session=talk.session,
            turn=talk.asked,
            arrived_s=talk.arrived_s,
            queue_s=talk.started_s - talk.arrived_s,
            load_s=found.load_s,
            hidden_s=found.hidden_s,
            token_s=talk.token_s,
            save_ahead_s=talk.save_ahead_s,
            save_s=self.clock.now() - ended_s,
            tier=found.tier,
            lost_to=found.lost,
            reused_tokens=found.reused,
            new_tokens=talk.new_tokens,
            tokens=tokens,
            stop=stop,
        )
        self._ended.append((answer, saved))
        if not talk.over:
            heappush(
                self._coming, (ended_s + talk.think_s[talk.asked - 1], next(self._order), talk)
            )

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], dtype=torch.long, device=self.engine.model.device)
