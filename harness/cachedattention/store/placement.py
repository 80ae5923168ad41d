"""Which session lies in which tier, as its policy wants it: the bookkeeping, without a single tensor.

A session lies in one tier, whole. What leaves a tier goes to the next slower one, out of the last one it is gone. The
store carries the moves out; the simulator counts and times them.
"""

from __future__ import annotations

import errno
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from math import inf
from typing import Generic, TypeVar

from harness.cachedattention.store.policies import EvictionPolicy, PlacedSession, Rank
from methods.tiers.tier import DEVICE, DISK, HOST, TIERS

SLACK = 64  # stale entries of the heap that are not worth a new one
Name = TypeVar("Name", bound=Hashable)


class TierContents:
    """What lies in the tier `name`. A rank may rise without notice; where it falls, `push` says so."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, capacity
        self.items: dict[str, PlacedSession] = {}
        self.bytes = 0
        self._heap: list[tuple[Rank, str]] = []  # may hold ranks that rose since, and sessions that left

    @property
    def free(self) -> int:
        return self.capacity - self.bytes

    def add(self, item: PlacedSession, rank: Rank) -> None:
        self.items[item.session] = item
        self.bytes += item.size
        self.push(item, rank)

    def remove(self, item: PlacedSession) -> None:
        del self.items[item.session]
        self.bytes -= item.size

    def push(self, item: PlacedSession, rank: Rank) -> None:
        heappush(self._heap, (rank, item.session))
        if len(self._heap) > 2 * len(self.items) + SLACK:
            lowest = {session: rank for rank, session in sorted(self._heap, reverse=True) if session in self.items}
            self._heap = [(rank, session) for session, rank in lowest.items()]
            heapify(self._heap)

    def lowest(self, rank: Callable[[PlacedSession], Rank]) -> PlacedSession:
        while True:
            known, session = self._heap[0]
            item = self.items.get(session)
            if item is None:
                heappop(self._heap)
            elif (now := rank(item)) != known:
                heapreplace(self._heap, (now, session))
            else:
                return item


class DiskAccount(Generic[Name]):
    """Which blocks of which sessions lie in files of a disk of `capacity` bytes: names and sizes, the store's and the
    simulator's.

    A session that moved into memory leaves its files as a spare copy: it costs nothing while there is room, and saves
    the writing when the session comes back. Spare copies go first where room is needed, the oldest one before all.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.bytes = capacity, 0
        self._blocks: dict[str, Mapping[Name, int]] = {}
        self._spare: OrderedDict[str, None] = OrderedDict()  # the first became one first

    def make_room(self, session: str, blocks: Mapping[Name, int], drop: Callable[[str], None]) -> None:
        """Has spare copies of others dropped until `blocks` fit, as all that the session has. OSError: none is left."""
        more = sum(blocks.values()) - sum(self._blocks.get(session, {}).values())
        while self.bytes + more > self.capacity:
            spare = next((other for other in self._spare if other != session), None)
            if spare is None:
                raise OSError(errno.ENOSPC, "no room in the disk tier")
            drop(spare)

    def hold(self, session: str, blocks: Mapping[Name, int]) -> int:
        """`blocks` are all that the session has now. -> bytes of those that it had not yet"""
        before = self._blocks.get(session, {})
        self._blocks[session] = blocks
        self.bytes += sum(blocks.values()) - sum(before.values())
        self._spare.pop(session, None)
        return sum(size for name, size in blocks.items() if name not in before)

    def spare(self, session: str) -> None:
        """It lies in memory now."""
        if session in self._blocks:
            self._spare[session] = None

    def drop(self, session: str) -> None:
        self.bytes -= sum(self._blocks.pop(session, {}).values())
        self._spare.pop(session, None)


class JobQueue:
    """A ticket is a job's number in order of arrival; a session may have several. Jobs may leave out of turn, so the
    tickets of those that wait have gaps."""

    def __init__(self) -> None:
        self._jobs: dict[int, str] = {}
        self._order: list[int] = []  # the tickets of those that wait: the k-th one at once
        self._tickets: dict[str, deque[int]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[str]:
        """The session of each job."""
        return iter(self._jobs.values())

    def join(self, session: str) -> None:
        self._jobs[self._next] = session
        self._order.append(self._next)
        self._tickets.setdefault(session, deque()).append(self._next)
        self._next += 1

    def leave(self, session: str) -> None:
        """Its first job starts, or is given up."""
        tickets = self._tickets[session]
        ticket = tickets.popleft()
        del self._jobs[ticket], self._order[bisect_left(self._order, ticket)]
        if not tickets:
            del self._tickets[session]

    def ticket(self, session: str) -> int | None:
        """Of its first job."""
        tickets = self._tickets.get(session)
        return tickets[0] if tickets else None

    def horizon(self, count: int) -> int:
        """The tickets of the next `count` jobs lie below it, and no other's that waits."""
        return self._order[count] if count < len(self._order) else self._next

    def between(self, start: int, end: int) -> list[str]:
        """The sessions of the jobs whose tickets lie from `start` to below `end`."""
        places = (bisect_left(self._order, ticket) for ticket in (start, end))
        return [self._jobs[ticket] for ticket in self._order[slice(*places)]]


@dataclass(frozen=True, slots=True)
class Move:
    """`source` None: it comes from outside. `target` None: it leaves the store."""

    session: str
    source: str | None
    target: str | None
    size: int  # bytes


def in_order(moves: Sequence[Move]) -> list[Move]:
    """As they are to be carried out: what comes from disk first, for its files may make room for what goes there."""
    return sorted(moves, key=lambda move: move.source != DISK or move.target is None)


def without_copies(capacities: Mapping[str, int]) -> int:
    """Bytes of the disk that are left beside copies of all that faster tiers hold. ValueError: none."""
    left = 2 * capacities[DISK] - sum(capacities.values())
    if left <= 0:
        raise ValueError("copies=true needs a disk larger than the memory whose copies it is to hold")
    return left


class Placement:
    """`capacities`: bytes by tier; a tier of 0 bytes does not exist. `ttl_s`: seconds since the last use after which a
    session is dropped. `copies`: what lies on disk leaves as many bytes free there as the tiers above hold, for spare
    copies of their sessions. `reserve`: share of host memory that is to be free; below it, sessions go to disk ahead
    of need. Moves are to be carried out as `in_order` says."""

    def __init__(
        self,
        capacities: Mapping[str, int],
        policy: EvictionPolicy,
        ttl_s: float = inf,
        copies: bool = False,
        reserve: float = 0.0,
    ) -> None:
        given = {name: capacities[name] for name in TIERS if capacities.get(name)}
        if copies and DISK in given:
            given[DISK] = without_copies(given)
        self.levels = [TierContents(name, size) for name, size in given.items()]  # the fastest tier first
        self.names = list(given)
        self.policy, self.ttl_s, self.reserve = policy, ttl_s, reserve
        self.queue = JobQueue()
        self.items: OrderedDict[str, PlacedSession] = OrderedDict()  # least recently used first
        self._waiting_capacity = sum(size for name, size in given.items() if name != DEVICE)
        self._ticks = self._bytes = 0
        self._farthest = 0  # the window's end, where it was farthest since ranks were last put right

    def tier(self, session: str) -> str | None:
        item = self.items.get(session)
        return self.names[item.level] if item else None

    @property
    def mean_size(self) -> float:
        return self._bytes / len(self.items) if self.items else 0.0

    def save(self, session: str, size: int, now_s: float, fastest: str | None = None) -> list[Move]:
        """The session is `size` bytes now, and goes into the fastest tier that can hold it, `fastest` at best."""
        moves: list[Move] = []
        item = self.items.get(session)
        if item:
            source = self.names[item.level]
            self.levels[item.level].remove(item)
            self._bytes += size - item.size
            item.size = size
        else:
            source = None
            item = self.items[session] = PlacedSession(session, size, self._ticks + 1, 0, 0.0, 0)
            self._bytes += size
        self._touch(item, now_s)
        self._place(item, self.names.index(fastest) if fastest in self.names else 0, source, moves)
        self._relieve(item, moves)
        return moves

    def use(self, session: str, now_s: float) -> list[Move]:
        """A job starts with it: it comes into the fastest tier that can hold it."""
        item = self.items[session]
        self._touch(item, now_s)
        self.levels[item.level].push(item, self.rank(item))
        moves = self._raise(item, 0)
        self._relieve(item, moves)
        return moves

    def prefetch(self) -> Iterator[list[Move]]:
        """Brings the sessions of the next jobs from disk into host memory, where nothing more valuable has to give way.

        Moves are those of one session at a time, to be carried out before the next is asked for."""
        if HOST not in self.names or DISK not in self.names:
            return
        level = self.names.index(HOST)
        for session in list(islice(self.queue, self.policy.window(self.levels[level].capacity, self.mean_size))):
            item = self.items.get(session)
            if item and item.level > level:
                moves = self._raise(item, level)
                if not moves:
                    return
                yield moves

    def expire(self, now_s: float) -> list[Move]:
        """Drops what was not used for `ttl_s`."""
        moves: list[Move] = []
        while self.items and now_s - (oldest := next(iter(self.items.values()))).used_s > self.ttl_s:
            moves += self.drop(oldest.session)
        return moves

    def shrink(self, session: str, size: int) -> None:
        """Fewer bytes, in the tier where it lies."""
        item = self.items[session]
        tier = self.levels[item.level]
        tier.remove(item)
        self._bytes += size - item.size
        item.size = size
        tier.add(item, self.rank(item))

    def drop(self, session: str) -> list[Move]:
        item = self.items[session]
        tier = self.levels[item.level]
        tier.remove(item)
        return [self._out(item, tier.name)]

    def rank(self, item: PlacedSession) -> Rank:
        horizon = self._horizon()
        self._farthest = max(self._farthest, horizon)
        return self.policy.rank(item, self.queue.ticket(item.session), horizon)

    def _horizon(self) -> int:
        return self.queue.horizon(self.policy.window(self._waiting_capacity, self.mean_size))

    def _note_fallen(self) -> None:
        """Sessions that have grown shrink the window: those whose jobs it has lost rank lower than their tiers know."""
        horizon = self._horizon()
        for session in self.queue.between(horizon, self._farthest):
            if item := self.items.get(session):
                self.levels[item.level].push(item, self.rank(item))
        self._farthest = horizon

    def _touch(self, item: PlacedSession, now_s: float) -> None:
        self._ticks += 1
        item.used, item.used_s = self._ticks, now_s
        self.items.move_to_end(item.session)

    def _raise(self, item: PlacedSession, level: int) -> list[Move]:
        """Into a tier from `level` on that is faster than its own; no moves where none takes it."""
        moves: list[Move] = []
        tier = self.levels[item.level]
        tier.remove(item)  # so that what makes way may have its place
        self._place(item, level, tier.name, moves)
        return moves

    def _place(self, item: PlacedSession, level: int, source: str | None, moves: list[Move]) -> None:
        """Into the first tier from `level` on that takes it, else out."""
        for slower in range(level, len(self.levels)):
            if self._make_room(slower, item, moves):
                self._settle(item, slower, source, moves)
                return
        moves.append(self._out(item, source))

    def _make_room(self, level: int, item: PlacedSession, moves: list[Move]) -> bool:
        """Nothing of a higher rank makes way."""
        tier = self.levels[level]
        if item.size > tier.capacity:
            return False
        victims: list[PlacedSession] = []
        before = item.entered
        if level != item.level:
            item.entered = self._ticks = self._ticks + 1
        self._note_fallen()
        while tier.free < item.size:
            victim = tier.lowest(self.rank)
            if self.rank(victim) > self.rank(item):
                item.entered = before
                for one in victims:
                    tier.add(one, self.rank(one))
                return False
            tier.remove(victim)
            victims.append(victim)
        for victim in victims:
            self._place(victim, level + 1, tier.name, moves)
        return True

    def _relieve(self, stays: PlacedSession, moves: list[Move]) -> None:
        """From host memory to disk until the reserve is free, but for `stays`, which has just come, and for what a job
        in the window waits for. Nothing leaves the disk for this."""
        if not self.reserve or HOST not in self.names or DISK not in self.names:
            return
        level = self.names.index(HOST)
        tier, disk = self.levels[level], self.levels[level + 1]
        self._note_fallen()
        while tier.items and tier.free < self.reserve * tier.capacity:
            victim = tier.lowest(self.rank)
            if victim is stays or self.rank(victim)[0] or victim.size > disk.free:
                return
            tier.remove(victim)
            self._settle(victim, level + 1, HOST, moves)

    def _settle(self, item: PlacedSession, level: int, source: str | None, moves: list[Move]) -> None:
        item.level = level
        tier = self.levels[level]
        tier.add(item, self.rank(item))
        if tier.name != source:
            moves.append(Move(item.session, source, tier.name, item.size))

    def _out(self, item: PlacedSession, source: str | None) -> Move:
        del self.items[item.session]
        self._bytes -= item.size
        return Move(item.session, source, None, item.size)
