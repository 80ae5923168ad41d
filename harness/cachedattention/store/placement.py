"""The bookkeeping of which session lies in which tier, as its policy wants it (CachedAttention, section 3.3).

A session lies in one tier, whole. What leaves a tier goes to the next slower one; what leaves the last one is gone. The
store carries the moves out; the simulator counts and times them. Nothing here holds a tensor.
"""

from __future__ import annotations

import errno
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from math import inf
from typing import ClassVar, Generic, TypeVar

from harness.config.values import SettingsError
from methods.tiers.tier import DEVICE, DISK, HOST, TIERS

SLACK = 64  # stale entries of the heap that are not worth a new one
Name = TypeVar("Name", bound=Hashable)
Rank = tuple[int, int]


@dataclass(slots=True)
class PlacedSession:
    """A stored session. `entered`, when it came into its tier, and `used` are ticks of the store's own count, which no
    clock disturbs; `used_s` is the time of the last use, for the time to live. `level`: its tier, 0 the fastest."""

    session: str
    size: int  # bytes
    entered: int
    used: int
    used_s: float
    level: int


class LRU:
    """The policy by which the least recently used session leaves first: the one of the smallest rank."""

    name: ClassVar[str] = "lru"

    def rank(self, item: PlacedSession, ticket: int | None, horizon: int) -> Rank:
        """Return the rank of a session. `ticket`: that of its waiting job, None without one; tickets below `horizon`
        are in the window."""
        return 0, item.used

    def window(self, capacity: int, mean_size: float) -> int:
        """Return how many waiting jobs to look ahead at, over tiers that hold `capacity` bytes; 0 for none."""
        return 0


class FIFO(LRU):
    """The policy by which the session that has been in its tier for longest leaves first, used or not. What comes from
    another tier is the last one in, so it always finds room."""

    name = "fifo"

    def rank(self, item: PlacedSession, ticket: int | None, horizon: int) -> Rank:
        return 0, item.entered


class SchedulerAware(LRU):
    """CachedAttention's policy, with look-ahead windows over as many waiting jobs as there are sessions that fit.

    A session with a job in the window is exempt. Among the others the least recently used leaves first; where all
    are exempt, the one whose job is nearest the tail.
    """

    name = "scheduler_aware"

    def rank(self, item: PlacedSession, ticket: int | None, horizon: int) -> Rank:
        return (0, item.used) if ticket is None or ticket >= horizon else (1, -ticket)

    def window(self, capacity: int, mean_size: float) -> int:
        return int(capacity / mean_size) if mean_size else 0


POLICIES: Mapping[str, type[LRU]] = {policy.name: policy for policy in (SchedulerAware, LRU, FIFO)}


class TierContents:
    """The sessions in the tier `name`. A rank may rise without notice; where it falls, `push` must be called."""

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
    """The account of a disk of `capacity` bytes: names and sizes of the blocks in files, by session. The store and the
    simulator keep it.

    A session that moved into memory leaves its files as a spare copy: it costs nothing while there is room, and saves
    the writing when the session comes back. Spare copies go first where room is needed, the oldest one before all.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.bytes = capacity, 0
        self._blocks: dict[str, Mapping[Name, int]] = {}
        self._spare: OrderedDict[str, None] = OrderedDict()  # the first became one first

    def make_room(self, session: str, blocks: Mapping[Name, int], drop: Callable[[str], None]) -> None:
        """Drop spare copies of others until `blocks`, all that the session has, fit. Raise OSError if none is left."""
        more = sum(blocks.values()) - sum(self._blocks.get(session, {}).values())
        while self.bytes + more > self.capacity:
            spare = next((other for other in self._spare if other != session), None)
            if spare is None:
                raise OSError(errno.ENOSPC, "no room in the disk tier")
            drop(spare)

    def hold(self, session: str, blocks: Mapping[Name, int]) -> int:
        """Note that `blocks` are all that the session has now; return the bytes of those that it had not yet."""
        before = self._blocks.get(session, {})
        self._blocks[session] = blocks
        self.bytes += sum(blocks.values()) - sum(before.values())
        self._spare.pop(session, None)
        return sum(size for name, size in blocks.items() if name not in before)

    def spare(self, session: str) -> None:
        """Note that the session lies in memory now, so that its files are a spare copy."""
        if session in self._blocks:
            self._spare[session] = None

    def drop(self, session: str) -> None:
        self.bytes -= sum(self._blocks.pop(session, {}).values())
        self._spare.pop(session, None)


class JobQueue:
    """The jobs that wait, at most one of each session. A ticket is a job's number in order of arrival. Jobs may leave
    out of turn, so the tickets of those that wait have gaps."""

    def __init__(self) -> None:
        self._jobs: dict[int, str] = {}
        self._order: list[int] = []  # the tickets of those that wait: the k-th one at once
        self._tickets: dict[str, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the sessions of the jobs."""
        return iter(self._jobs.values())

    def join(self, session: str) -> None:
        self._tickets[session], self._jobs[self._next] = self._next, session
        self._order.append(self._next)
        self._next += 1

    def leave(self, session: str) -> None:
        """Remove the session's job, which starts or is given up."""
        ticket = self._tickets.pop(session)
        del self._jobs[ticket], self._order[bisect_left(self._order, ticket)]

    def ticket(self, session: str) -> int | None:
        """Return the ticket of the session's job."""
        return self._tickets.get(session)

    def horizon(self, count: int) -> int:
        """Return the number below which lie the tickets of the next `count` jobs, and of no others that wait."""
        return self._order[count] if count < len(self._order) else self._next

    def between(self, start: int, end: int) -> list[str]:
        """Return the sessions of the jobs whose tickets lie from `start` to below `end`."""
        places = (bisect_left(self._order, ticket) for ticket in (start, end))
        return [self._jobs[ticket] for ticket in self._order[slice(*places)]]


@dataclass(frozen=True, slots=True)
class Move:
    """A session's way from tier to tier. `source` None: it comes from outside. `target` None: it leaves the store."""

    session: str
    source: str | None
    target: str | None
    size: int  # bytes


def in_order(moves: Sequence[Move]) -> list[Move]:
    """Return the moves as they are to be carried out: first what comes from disk, whose files may make room there."""
    return sorted(moves, key=lambda move: move.source != DISK or move.target is None)


def without_copies(capacities: Mapping[str, int]) -> int:
    """Return the bytes of the disk that copies of all that faster tiers hold leave free. Raise `SettingsError` if
    none."""
    left = 2 * capacities[DISK] - sum(capacities.values())
    if left <= 0:
        raise SettingsError("disk is too small for copies of what lies in memory: raise disk, or set copies=false.")
    return left


class Placement:
    """The record of which session lies in which tier. `capacities`: bytes by tier; a tier of 0 bytes does not exist.
    `ttl_s`: seconds since the last use after which a session is dropped. `copies`: what lies on disk leaves as many
    bytes free there as the tiers above hold, for spare copies of their sessions. Moves are to be carried out as
    `in_order` says."""

    def __init__(self, capacities: Mapping[str, int], policy: LRU, ttl_s: float = inf, copies: bool = False) -> None:
        given = {name: capacities[name] for name in TIERS if capacities.get(name)}
        if copies and DISK in given:
            given[DISK] = without_copies(given)
        self.levels = [TierContents(name, size) for name, size in given.items()]  # the fastest tier first
        self.names = list(given)
        self.policy, self.ttl_s = policy, ttl_s
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
        """Put the session, of `size` bytes now, into the fastest tier that can hold it, `fastest` at best."""
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
        return moves

    def use(self, session: str, now_s: float) -> list[Move]:
        """Bring the session, with which a job starts, into the fastest tier that can hold it."""
        item = self.items[session]
        self._touch(item, now_s)
        self.levels[item.level].push(item, self.rank(item))
        return self._raise(item, 0)

    def prefetch(self) -> Iterator[list[Move]]:
        """Bring the sessions of the next jobs from disk into host memory, where nothing more valuable has to give way.
        Yield the moves of one session at a time, to be carried out before the next is asked for."""
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
        """Drop what was not used for `ttl_s`."""
        moves: list[Move] = []
        while self.items and now_s - (oldest := next(iter(self.items.values()))).used_s > self.ttl_s:
            moves += self.drop(oldest.session)
        return moves

    def shrink(self, session: str, size: int) -> None:
        """Note that the session has fewer bytes now, in the tier where it lies."""
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
        """Tell the tiers of ranks that fell: sessions that have grown shrink the window, which then loses jobs."""
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
        """Move the session into a tier from `level` on that is faster than its own, if one takes it."""
        moves: list[Move] = []
        tier = self.levels[item.level]
        tier.remove(item)  # so that what makes way may have its place
        self._place(item, level, tier.name, moves)
        return moves

    def _place(self, item: PlacedSession, level: int, source: str | None, moves: list[Move]) -> None:
        """Move the session into the first tier from `level` on that takes it, or else out."""
        for slower in range(level, len(self.levels)):
            if self._make_room(slower, item, moves):
                self._settle(item, slower, source, moves)
                return
        moves.append(self._out(item, source))

    def _make_room(self, level: int, item: PlacedSession, moves: list[Move]) -> bool:
        """Move lower ranks out of a tier until the session fits; return False where only higher ranks are left."""
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
                for victim in victims:
                    tier.add(victim, self.rank(victim))
                return False
            tier.remove(victim)
            victims.append(victim)
        for victim in victims:
            self._place(victim, level + 1, tier.name, moves)
        return True

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
