"""Sessions in tiers: against the paper's example, a brute-force rule, and what must always hold."""

from __future__ import annotations

import random

import pytest

from harness.cachedattention.store.placement import (
    POLICIES,
    Move,
    PlacedSession,
    Placement,
    Policy,
    TierContents,
)
from methods.tiers.tier import DISK, HOST


def placed(placement: Placement) -> dict[str, str | None]:
    return {session: placement.tier(session) for session in placement.items}


def test_figure_9_the_nearest_jobs_are_fetched_and_the_farthest_make_way() -> None:
    """Host memory has 2 slots, disk 4. Jobs 2 to 6 wait; 2 and 5 lie in host memory, 3, 4, 6 and an idle 1 on disk."""
    placement = Placement({HOST: 2, DISK: 4}, POLICIES["scheduler_aware"])
    for session in ("6", "4", "3", "1"):
        placement.save(session, 1, 0, fastest=DISK)
    for session in ("2", "5"):
        placement.save(session, 1, 0)
    for session in ("2", "3", "4", "5", "6"):
        placement.queue.join(session)
    moves = [move for moves in placement.prefetch() for move in moves]
    assert moves == [Move("5", HOST, DISK, 1), Move("3", DISK, HOST, 1)]
    placement.queue.join("7")
    placement.save("7", 1, 1)  # nothing idle in host memory: 7, the farthest, goes to disk, and 1, which idles, out
    assert placed(placement) == {"2": HOST, "3": HOST, "4": DISK, "5": DISK, "6": DISK, "7": DISK}


def test_fifo_counts_from_the_arrival_in_a_tier() -> None:
    """The oldest session falls to disk; used again it is the newest in host memory, and the others leave before it."""
    placement = Placement({HOST: 2, DISK: 2}, POLICIES["fifo"])
    for session in "abc":
        placement.save(session, 1, 0)
    assert placed(placement) == {"a": DISK, "b": HOST, "c": HOST}
    assert placement.use("a", 1) == [Move("b", HOST, DISK, 1), Move("a", DISK, HOST, 1)]
    placement.save("d", 1, 2)
    assert placed(placement) == {"a": HOST, "b": DISK, "c": DISK, "d": HOST}
    placement.save("e", 1, 3)  # a, in host memory for longest, falls; b, on disk for longest, is gone
    assert placed(placement) == {"a": DISK, "c": DISK, "d": HOST, "e": HOST}


@pytest.mark.parametrize("policy", POLICIES.values())
@pytest.mark.parametrize("seed", range(2))
def test_tiers_hold_what_the_moves_say_and_never_too_much(policy: Policy, seed: int) -> None:
    rng = random.Random(seed)
    placement = Placement({"device": 20, HOST: 60, DISK: 200}, policy, ttl_s=300)
    where: dict[str, str] = {}
    sizes: dict[str, int] = {}
    waiting: list[str] = []
    for now in range(2000):
        session = str(rng.randrange(60))
        moves: list[Move] = []
        if rng.random() < 0.4 and session not in waiting:
            placement.queue.join(session)
            waiting.append(session)
        elif waiting and rng.random() < 0.6:
            placement.queue.leave(session := waiting.pop(0))
            moves += placement.use(session, now) if session in placement.items else []
        else:
            sizes[session] = rng.randrange(1, 12)
            moves += placement.save(session, sizes[session], now)
        moves += [move for moves in placement.prefetch() for move in moves] + placement.expire(now)
        for move in moves:
            assert where.get(move.session) == move.source
            where[move.session] = move.target or ""
            where = {name: tier for name, tier in where.items() if tier}
        assert where == placed(placement)
        for tier in placement.levels:
            held = [name for name, place in where.items() if place == tier.name]
            assert tier.bytes == sum(sizes[name] for name in held) <= tier.capacity
    assert where


@pytest.mark.parametrize("policy", POLICIES.values())
@pytest.mark.parametrize(("in_turn", "seed"), [(True, 16), (False, 14)], ids=["in turn", "out of turn"])
def test_who_makes_way_has_the_smallest_rank(
    policy: Policy, in_turn: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions that grow shrink the window, which changes ranks of others. With these seeds that matters."""
    asked: list[bool] = []
    by_ticks = Placement.lowest

    def lowest(placement: Placement, tier: TierContents) -> PlacedSession:
        found = by_ticks(placement, tier)
        asked.append(found is min(tier.items.values(), key=placement.rank))
        return found

    monkeypatch.setattr(Placement, "lowest", lowest)
    rng = random.Random(seed)
    placement = Placement({HOST: 60, DISK: 200}, policy)
    for now in range(1500):
        session = str(rng.randrange(80))
        if len(placement.queue) > 20:
            waiting = list(placement.queue)
            placement.queue.leave(session := waiting[0] if in_turn else rng.choice(waiting))
            if session in placement.items:
                placement.use(session, now)
        elif session not in placement.queue.tickets:
            placement.queue.join(session)
        if session not in placement.queue.tickets:
            placement.save(session, rng.choice((1, 2, 3, 30)), now)
    assert len(asked) > 500
    assert all(asked)
