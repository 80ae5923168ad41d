"""One small trace through the simulator and through the loop with a real store: same hits, evictions, bytes on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.cachedattention.serving.loop import Clock, ServingLoop
from harness.cachedattention.serving.plan import Session
from harness.cachedattention.simulation.costs import Costs, Hardware, Prices, Served
from harness.cachedattention.simulation.scenario import Scenario
from harness.cachedattention.simulation.server import OpenConversation, Server
from harness.cachedattention.simulation.trace import TracedConversation, TurnLengths
from harness.cachedattention.store.fingerprint import Fingerprint
from harness.cachedattention.store.history_store import HistoryStore
from harness.cachedattention.store.placement import POLICIES, Move, Placement
from harness.cachedattention.turns.stored import StoredCaches
from harness.engine.attach import attached
from harness.engine.cache import KVCache
from methods.full import Full
from tests.talks import session
from tests.timed import STEP_S, Time, Timed, ending
from tests.tiny import tiny

TOKEN_BYTES = 3 * 2 * 2 * 16 * 4  # of tests/tiny.py's llama
TOKEN_S = 0.125  # as all times here, so that both sides add them up without rounding
SLOTS = 2
BLOCK = 8
SESSIONS = [
    session(
        str(place), 3.25 * place, *[(8 + (5 * place + 3 * turn) % 17, 3 + (place + turn) % 5) for turn in range(turns)],
        think_s=[4.0 + (7 * place + 11 * turn) % 23 for turn in range(turns - 1)], seed=place,
    )
    for place, turns in enumerate((4, 3, 5, 1, 4, 3, 2, 5, 3, 4))
]  # fmt: skip


class Told(NamedTuple):
    """What both say of a turn."""

    session: str
    turn: int
    tier: str | None
    reused_tokens: int
    queue_s: float


def conversation(one: Session) -> TracedConversation:
    """As the simulator counts: the last token of an answer, which is never fed, is the next question's first."""
    turns = [
        TurnLengths(len(turn.prompt.ids) + (place > 0), turn.new_tokens - 1)
        for place, turn in enumerate(one.item.turns)
    ]
    return TracedConversation(one.name, one.start_s, tuple(turns), one.think_s)


class Knowing(Server):
    """A server that knows, as the loop does and CachedAttention's does not, which turn is a conversation's last."""

    def _save(self, state: OpenConversation, store: Placement) -> None:
        if state.turn < len(state.conversation.turns):
            super()._save(state, store)


def simulated(policy: str, host: int, disk: int) -> tuple[list[Told], list[Move], int]:
    """Loading takes no time, as on the loop's clock. -> turns, moves, bytes written to disk"""
    model = Served(
        kv_bytes_per_token=TOKEN_BYTES, window=4096, gpus=1, batch=SLOTS, prefill_s_per_token=TOKEN_S,
        decode_step_s=STEP_S,
    )  # fmt: skip
    prices = Prices(gpu_usd_per_hour=1, dram_usd_per_gb_hour=1, ssd_usd_per_gb_hour=1)
    costs = Costs(Hardware(pcie_bytes_per_s=1e30, disk_bytes_per_s=1e30), prices, {"tiny": model})
    scenario = Scenario(model="tiny", policy=policy, host=host, disk=disk, copies=False, preload="off")
    server = Knowing(scenario, costs)
    jobs = server.serve([conversation(one) for one in SESSIONS])
    told = [Told(j.session, j.turn + 1, j.tier, j.history if j.tier else 0, j.wait_s) for j in jobs]
    return told, server.moves, server.disk.written_bytes


class Logged(Placement):
    """A store's, which remembers its moves."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.moves: list[Move] = []

    def save(self, *given: Any, **named: Any) -> list[Move]:
        return self._noted(super().save(*given, **named))

    def use(self, *given: Any) -> list[Move]:
        return self._noted(super().use(*given))

    def prefetch(self) -> Iterator[list[Move]]:
        return map(self._noted, super().prefetch())

    def _noted(self, moves: list[Move]) -> list[Move]:
        self.moves += [replace(move, session=move.session.partition("/")[2]) for move in moves]
        return moves


def served(policy: str, host: int, disk: int, folder: Path) -> tuple[list[Told], list[Move], int]:
    time = Time()
    who = Fingerprint(model="tiny", weights="7", tokenizer="ids", rotary="default", dtype="fp32")
    with attached(tiny("llama"), Full()) as kv:
        store = HistoryStore(
            who,
            host=host,
            disk=disk,
            folder=folder,
            policy=POLICIES[policy],
            block_tokens=BLOCK,
            clock=time,
            threads=0,  # the simulated disk takes no time
        )
        histories = StoredCaches(lambda capacity: kv.start(KVCache, capacity=capacity), kv, store, read_buffer=0)
        engine = Timed(kv, time, token_s=TOKEN_S)
        answers = list(ServingLoop(engine, histories, Clock(time), ending=ending, slots=SLOTS).serve(SESSIONS))
        assert isinstance(store.placement, Logged)
        store.flush()
        written = store.statistics.written_bytes  # closing writes what is in memory
        histories.close()
    answers.sort(key=lambda one: one.arrived_s + one.queue_s)
    told = [Told(a.session, a.turn, a.tier, a.reused_tokens, a.queue_s) for a in answers]
    return told, store.placement.moves, written


@pytest.mark.parametrize("policy", POLICIES)
def test_simulator_and_store_agree(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 60 tokens in memory, 150 on disk: sessions are evicted there, dropped from there, and
    fetched ahead."""
    monkeypatch.setattr("harness.cachedattention.simulation.server.BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr("harness.cachedattention.store.history_store.Placement", Logged)
    given = policy, 60 * TOKEN_BYTES, 150 * TOKEN_BYTES
    jobs, moves, written = simulated(*given)
    assert served(*given, tmp_path) == (jobs, moves, written)
    assert {None, "host"} <= {job.tier for job in jobs}
    ways = {(move.source, move.target) for move in moves}
    assert {("host", "disk"), ("disk", "host"), ("disk", None)} <= ways
