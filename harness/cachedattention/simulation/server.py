"""Simulates a server with slots, which goes from event to event: prefills of one turn each, and
decode steps of all running turns.

A prefill halts the decoding, as continuous batching does. Turns run first come, first served.
Copying new keys and values off the device is taken to be hidden by decoding; loading is hidden as
far as `preload` lets it be."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from harness.cachedattention.simulation.costs import Costs, Hardware
from harness.cachedattention.simulation.scenario import RECOMPUTE, Scenario
from harness.cachedattention.simulation.trace import TracedConversation, TurnLengths
from harness.cachedattention.store.placement import (
    POLICIES,
    DiskAccount,
    JobQueue,
    Move,
    Placement,
    in_order,
)
from harness.config.settings import BLOCK_TOKENS
from harness.config.values import size
from methods.tiers.tier import DISK, HOST


class SimulatedDisk:
    """Simulate the disk of a server, which reads and writes one after the other, or at the same
    time with `disk_duplex`. What waits to be written lies in memory: once it is more than
    `write_buffer` bytes, the caller waits, as in the store. Times are seconds of the simulation."""

    def __init__(self, capacity: int, hardware: Hardware, write_buffer: int) -> None:
        self.files = DiskAccount(capacity)
        self.written_bytes = self.read_bytes = 0
        self._hardware, self._write_buffer = hardware, write_buffer
        self._read_s = self._write_s = 0.0  # when the last of them will be done
        self._waiting: deque[tuple[float, str, int]] = deque()  # done at, session, bytes
        self._held = 0  # bytes that wait
        self._rows: dict[str, int] = {}  # of these, by session, what is of use to it

    def read(self, session: str, size: int, now_s: float) -> float:
        """Read `size` bytes of a stored conversation that lies on this disk, without those that
        still wait in memory to be written; return the time at which they are in memory."""
        self._collect(now_s)
        size -= min(size, self._rows.get(session, 0))
        self.read_bytes += size
        free_s = self._read_s if self._hardware.disk_duplex else max(self._read_s, self._write_s)
        self._read_s = max(now_s, free_s) + size / self._hardware.disk_bytes_per_s
        return self._read_s if size else now_s

    def write(self, session: str, blocks: Mapping[str, int], held: int, now_s: float) -> float:
        """Write a stored conversation's `blocks` (bytes by name) as far as the disk does not have
        them yet. `held`: bytes that stay in memory until that is done. Return the time until which
        the caller must wait for room in the write buffer; `now_s` if it need not wait."""
        self._collect(now_s)
        self.files.make_room(session, blocks, self.files.drop)
        size = self.files.hold(session, blocks)
        self.written_bytes += size
        free_s = self._write_s if self._hardware.disk_duplex else max(self._read_s, self._write_s)
        self._write_s = max(now_s, free_s) + size / self._hardware.disk_bytes_per_s
        self._waiting.append((self._write_s, session, held))
        self._rows[session] = self._rows.get(session, 0) + held
        self._held += held
        while self._held > self._write_buffer:
            now_s = max(now_s, self._waiting[0][0])
            self._done()
        return now_s

    def drop(self, session: str) -> None:
        self.files.drop(session)
        self._rows.pop(session, None)

    def _collect(self, now_s: float) -> None:
        while self._waiting and self._waiting[0][0] <= now_s:
            self._done()

    def _done(self) -> None:
        _, session, held = self._waiting.popleft()
        self._held -= held
        left = self._rows.pop(session, 0) - held
        if left > 0:
            self._rows[session] = left


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """The record of a turn that a simulated server has served."""

    session: str
    turn: int
    start_s: float  # from the beginning of the trace
    question: int  # tokens
    history: int
    tier: str | None  # where its history was found
    wait_s: float  # in the queue
    prefill_s: float  # from the start of the job to its first token, loading included
    load_s: float  # reading the history
    exposed_s: float  # of these, what computing did not hide
    busy_s: float  # of the server since the job before started
    halts: bool  # others were decoding, and waited for its first token


class Server:
    """The simulated server of one scenario. `serve` lets it serve the conversations of a trace;
    `jobs` records the turns and `moves` what the store moved between its tiers."""

    def __init__(self, scenario: Scenario, costs: Costs) -> None:
        self.scenario, self.hardware = scenario, costs.hardware
        self.model = costs.model(scenario.model)
        self.store: Placement | None = None
        if scenario.policy != RECOMPUTE:
            ttl_s = scenario.ttl_s or inf
            self.store = Placement(
                scenario.capacities, POLICIES[scenario.policy], ttl_s, scenario.copies
            )
        write_buffer = size("write_buffer", scenario.write_buffer)
        self.disk = SimulatedDisk(scenario.capacities[DISK], costs.hardware, write_buffer)
        self.queue = self.store.queue if self.store else JobQueue()
        self.now_s = self._busy_s = self._pcie_free_s = self._last_start_s = 0.0
        self._order = count()  # of questions that come at the same moment
        self._steps = 0  # decode steps since the beginning
        # (step of the last token, number of the job, session)
        self._running: list[tuple[int, int, str]] = []
        # since when, or from when on, a session's rows lie in host memory
        self._ready_s: dict[str, float] = {}
        self.jobs: list[ServedTurn] = []
        self.moves: list[Move] = []

    def serve(self, trace: Sequence[TracedConversation]) -> list[ServedTurn]:
        self.states = {talk.name: OpenConversation(talk) for talk in trace}
        self._coming = [(talk.start_s, next(self._order), talk.name) for talk in trace]
        heapify(self._coming)
        while self._coming or self.queue or self._running:
            self._arrivals()
            if self.queue and len(self._running) < self.model.batch:
                self._start(next(iter(self.queue)))
            elif self._running:
                self._decode()
            else:
                self.now_s = self._coming[0][0]
        return self.jobs

    def _arrivals(self) -> None:
        if self.store:
            self._carry_out(self.store.expire(self.now_s))
        while self._coming and self._coming[0][0] <= self.now_s:
            at, _, session = heappop(self._coming)
            self.states[session].asked_s = at
            self.queue.join(session)
            self._prefetch()

    def _start(self, session: str) -> None:
        state = self.states[session]
        turn = state.conversation.turns[state.turn].within(self.model.window)
        asked_s, start_s = state.asked_s, self.now_s
        self.queue.leave(session)
        self._fit(state, turn)
        tier, ready_s = self._find(session, state)
        computed = turn.question + (0 if tier else state.history)
        compute_s = computed * self.model.prefill_s_per_token
        load_s, exposed_s = self._load(state, tier, max(ready_s, asked_s), compute_s)
        self._prefetch()
        self._advance(compute_s + exposed_s)
        halts = bool(self._running)
        self.jobs.append(
            ServedTurn(
                session, state.turn, start_s, turn.question, state.history, tier, start_s - asked_s,
                self.now_s - start_s, load_s, exposed_s, self._busy_s, halts,
            )
        )  # fmt: skip
        self._busy_s = 0.0
        state.history += turn.question + turn.answer
        state.turn += 1
        heappush(self._running, (self._steps + turn.answer, len(self.jobs), session))

    def _fit(self, state: OpenConversation, turn: TurnLengths) -> None:
        """Cut the oldest tokens of the conversation's history until question and answer fit the
        window, as `Overflow` of turns/conversation.py does. Its stored keys and values are cut in
        the same way, or dropped where their positions are fixed in them (positions=coupled)."""
        before = state.history
        while state.history and state.history + turn.question + turn.answer > self.model.window:
            state.history = int(state.history * self.scenario.truncation_ratio)
        session = state.conversation.name
        if state.history < before and self.store and self.store.tier(session):
            if self.scenario.positions == "coupled" or not state.history:
                self._carry_out(self.store.drop(session))
            else:
                self._cut(state, before - state.history, self.store)

    def _cut(self, state: OpenConversation, tokens: int, store: Placement) -> None:
        """Drop the oldest `tokens` of a stored history in the tier where it lies. On disk, the
        block through which the cut goes is read and written anew."""
        session, cut = state.conversation.name, state.drop(tokens)
        store.shrink(session, self._bytes(state))
        if store.tier(session) == DISK:
            self.disk.read(session, cut * self.model.kv_bytes_per_token, self.now_s)
            first = next(iter(state.blocks.values())) if cut else 0
            self._write(state, first * self.model.kv_bytes_per_token)

    def _find(self, session: str, state: OpenConversation) -> tuple[str | None, float]:
        """Return the tier where the conversation's history is found, None on a miss, and the time
        from which on it can be loaded from host memory."""
        tier = self.store.tier(session) if self.store and state.history else None
        if tier is None or self.store is None:
            return None, self.now_s
        ready_s = self._ready_s.pop(session)
        if tier == DISK:
            ready_s = self.disk.read(session, self._bytes(state), self.now_s)
        self._carry_out(self.store.use(session, self.now_s), on_its_way=session)
        return DISK if tier == HOST and ready_s > self.now_s else tier, ready_s

    def _load(
        self, state: OpenConversation, tier: str | None, ready_s: float, compute_s: float
    ) -> tuple[float, float]:
        """Return the seconds that loading the history takes, and how many of them the turn waits
        for it. `tier`: where it was found; `ready_s`: the time since when its rows lie in host
        memory and the turn is known; `compute_s`: the seconds of its prefill.

        With preload=buffered, loading that takes longer than the prefill begins before the turn
        does, earlier by the difference. What is loaded in that time is the read buffer of
        CachedAttention, S_buf = B (T_load L_hist - T_pref L_new) bytes (`MeasuredSpeeds` explains
        the formula)."""
        previous_s, self._last_start_s = self._last_start_s, self.now_s
        if tier not in (HOST, DISK):
            return 0.0, 0.0
        load_s = self._bytes(state) / self.hardware.pcie_bytes_per_s
        if self.scenario.preload == "off":
            return load_s, max(0.0, ready_s - self.now_s) + load_s
        before_s = max(0.0, load_s - compute_s) if self.scenario.preload == "buffered" else 0.0
        buffered_s = max(self._pcie_free_s, previous_s, ready_s) + before_s
        self._pcie_free_s = max(buffered_s, self.now_s) + load_s - before_s
        return load_s, max(0.0, self._pcie_free_s - self.now_s - compute_s)

    def _decode(self) -> None:
        """Let the simulated time pass in which running turns decode: until the next answer ends, or
        until a question arrives for which there is a free slot."""
        steps = self._running[0][0] - self._steps
        if self._coming and len(self._running) < self.model.batch:
            steps = min(
                steps, int((self._coming[0][0] - self.now_s) / self.model.decode_step_s) + 1
            )
        self._steps += steps
        self._advance(steps * self.model.decode_step_s)
        self._arrivals()  # before anything is saved: who waits is exempt
        while self._running and self._running[0][0] == self._steps:
            state, ended_s = self.states[heappop(self._running)[2]], self.now_s
            if self.store:
                self._save(state, self.store)
            if state.turn < len(state.conversation.turns):
                again_s = ended_s + state.conversation.think_s[state.turn - 1]
                heappush(self._coming, (again_s, next(self._order), state.conversation.name))

    def _save(self, state: OpenConversation, store: Placement) -> None:
        """Save the conversation's history after a turn, as the store does: only what is new of it
        where the rest is stored already, otherwise all of it."""
        session, before = state.conversation.name, store.tier(state.conversation.name)
        if before is None:
            state.blocks.clear()
        known = sum(state.sizes(self.model.kv_bytes_per_token).values())
        state.append(state.history - sum(state.blocks.values()), BLOCK_TOKENS)
        self._ready_s[session] = self.now_s
        moves = store.save(session, self._bytes(state), self.now_s)
        tier = store.tier(session)
        if before == DISK != tier and tier:
            self._ready_s[session] = self.disk.read(session, known, self.now_s)
        self._carry_out(moves, on_its_way=session)
        if tier == DISK:
            self._write(state, self._bytes(state) - (known if before == DISK else 0))

    def _prefetch(self) -> None:
        if self.store:
            for moves in self.store.prefetch():
                self._carry_out(moves)

    def _carry_out(self, moves: Sequence[Move], on_its_way: str | None = None) -> None:
        """Carry out the store's moves between tiers. `on_its_way`: a conversation whose reads and
        writes the caller makes itself."""
        self.moves += moves
        for move in in_order(moves):
            if move.target is None:
                self.disk.drop(move.session)
            elif move.target == DISK:
                if move.session != on_its_way:
                    self._write(self.states[move.session], move.size)
            elif move.source == DISK:
                if move.session != on_its_way:
                    self._ready_s[move.session] = self.disk.read(
                        move.session, move.size, self.now_s
                    )
                self.disk.files.spare(move.session)

    def _write(self, state: OpenConversation, held: int) -> None:
        """Write those blocks of the conversation to disk that it does not have yet. If the write
        buffer is full, the server's time passes until there is room. `held`: bytes of keys and
        values that stay in memory until that is done."""
        sizes = state.sizes(self.model.kv_bytes_per_token)
        self._advance(
            self.disk.write(state.conversation.name, sizes, held, self.now_s) - self.now_s
        )

    def _advance(self, seconds: float) -> None:
        self.now_s += seconds
        self._busy_s += seconds

    def _bytes(self, state: OpenConversation) -> int:
        return state.history * self.model.kv_bytes_per_token


_names = map(str, count())


@dataclass(slots=True)
class OpenConversation:
    """The state of a conversation on a simulated server. `turn`: the next one; `history`: tokens of
    the turns so far that are left in the window. `blocks`: the number of tokens of each block in
    the store, by the block's name; a block is never changed, only made anew under another name."""

    conversation: TracedConversation
    turn: int = 0
    history: int = 0
    asked_s: float = 0.0  # of the question that waits or runs
    blocks: dict[str, int] = field(default_factory=dict)

    def append(self, tokens: int, length: int) -> None:
        """Add so many tokens to the stored history, in blocks of `length`, of which the last one
        may be shorter."""
        for start in range(0, tokens, length):
            self.blocks[next(_names)] = min(length, tokens - start)

    def drop(self, tokens: int) -> int:
        """Drop so many of the oldest tokens from the stored history. Return the old length of the
        block that the cut goes through, 0 where it goes through none."""
        kept: dict[str, int] = {}
        cut = 0
        for name, held in self.blocks.items():
            if tokens >= held:
                tokens -= held
            elif tokens:
                kept[next(_names)], cut, tokens = held - tokens, held, 0
            else:
                kept[name] = held
        self.blocks = kept
        return cut

    def sizes(self, token_bytes: int) -> Mapping[str, int]:
        """Return the bytes of each stored block by its name. `token_bytes`: bytes of a token's keys
        and values."""
        return {name: tokens * token_bytes for name, tokens in self.blocks.items()}
