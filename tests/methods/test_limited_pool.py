"""Each policy against lists and loops, on random streams of what is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from methods.base.counters import StepCounters
from methods.parts.limited_pool import Eviction, Fetched, LimitedPool, size

BATCH, HEADS, PROMPT, GENERATED = 2, 3, 40, 12
POLICIES: tuple[Eviction, ...] = ("counter", "fifo", "lru")


class Entry:
    """A token that one head holds."""

    def __init__(self, position: int, now: int) -> None:
        self.position, self.count, self.last = position, 0, now


class ByHand:
    """One head's pool: a list, oldest first."""

    def __init__(self, policy: Eviction, slots: int) -> None:
        self.policy, self.slots, self.now = policy, slots, 0
        self.held: list[Entry] = []
        self.evicted: list[int] = []

    def fetched(self, positions: list[int]) -> None:
        self.now += 1
        for entry in self.held:
            if entry.position in positions:
                entry.count, entry.last = entry.count + 1, self.now

    def enter(self, position: int) -> None:
        if len(self.held) == self.slots:
            older = [entry for entry in self.held[: self.slots // 2] if entry.position < PROMPT]
            worth = {"counter": lambda e: e.count, "lru": lambda e: e.last, "fifo": lambda e: e.position}
            victim = min(older, key=worth[self.policy])  # of equals the first
            self.evicted.append(victim.position)
            self.held.remove(victim)
        self.held.append(Entry(position, self.now))

    @property
    def prompt(self) -> list[int]:
        return [entry.position for entry in self.held if entry.position < PROMPT]


def draw_fetch(draw: Random, pools: list[list[ByHand]]) -> list[list[list[int]]]:
    """Positions that each head fetches, the same number for all heads of a sequence; early tokens more often."""
    made = []
    for heads in pools:
        count = draw.randint(1, len(heads[0].prompt))
        made.append([sorted(draw.sample(pool.prompt, count), key=lambda p: draw.random() * (p + 5)) for pool in heads])
    return made


def as_rows(fetch: list[list[list[int]]], columns: list[list[list[int]]]) -> Fetched:
    """Rows as a layer gives them: filled up, behind what a sequence fetches, with rows that it does not."""
    counts = [len(heads[0]) for heads in fetch]
    rows = torch.tensor(
        [
            [
                [column.index(p) for p in head] + [i for i, p in enumerate(column) if p not in head]
                for head, column in zip(heads, own, strict=True)
            ]
            for heads, own in zip(fetch, columns, strict=True)
        ]
    )
    return rows[:, :, : max(counts)], counts


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [17, 30, 45])
@pytest.mark.parametrize("on_device", [False, True])
def test_victims_are_those_of_a_list(policy: Eviction, slots: int, on_device: bool) -> None:
    draw = Random(slots)
    by_hand = [[ByHand(policy, slots) for _ in range(HEADS)] for _ in range(BATCH)]
    pool = LimitedPool(policy, slots, (BATCH, HEADS, PROMPT), torch.device("cpu"), StepCounters())
    every = [[list(range(PROMPT))] * HEADS] * BATCH

    def fetch(columns: list[list[list[int]]]) -> Fetched:
        positions = draw_fetch(draw, by_hand)
        for heads, fetched in zip(by_hand, positions, strict=True):
            for one, own in zip(heads, fetched, strict=True):
                one.fetched(own)
        rows, counts = as_rows(positions, columns)
        if not on_device:
            return rows, counts
        on_its_device = torch.tensor(counts)
        inside = torch.arange(rows.shape[2]) < on_its_device[:, None, None]
        return rows * inside, on_its_device  # zeros behind them, as `top_k` gives rows of counts that it does not know

    def enter(position: int) -> None:
        for one in (one for heads in by_hand for one in heads):
            one.enter(position)

    def fetches() -> Iterator[Fetched]:
        enter(0)
        for position in range(1, PROMPT):
            yield fetch(every)
            enter(position)

    if policy == "fifo":
        pool.take(())
        for position in range(PROMPT):
            enter(position)
    else:
        pool.take(stream := fetches())
        next(stream, None)  # its last token
    kept = pool.compact()
    assert kept.tolist() == [[one.prompt for one in heads] for heads in by_hand]
    for position in range(PROMPT, PROMPT + GENERATED):
        pool.fetched(*fetch(kept.tolist()))
        pool.enter_generated()
        enter(position)
        live = [[p[keep].tolist() for p, keep in zip(*both, strict=True)] for both in zip(kept, pool.live, strict=True)]
        assert live == [[one.prompt for one in heads] for heads in by_hand]
    due = PROMPT + GENERATED - slots
    assert all(len(set(one.evicted)) == due for heads in by_hand for one in heads)


@pytest.mark.parametrize(
    ("asked", "slots"), [(None, None), (1.0, None), (0.8, 80), (0.005, 0), (100, None), (300, None), (1, 1), (99, 99)]
)
def test_a_share_is_of_all_tokens(asked: float | None, slots: int | None) -> None:
    assert size(asked, 100) == slots
