"""The bookkeeping of which session (a stored conversation) lies in which tier, as a policy wants it
(CachedAttention, section 3.3).

A session lies in one tier, whole. What leaves a tier goes to the next slower one; what leaves the
last one is gone. The store carries the moves out; the simulator counts and times them. Nothing here
holds a tensor."""

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
    """A stored conversation as the placement knows it. `entered` (when it came into its tier) and
    `used` count the store's own ticks, which no clock disturbs; `used_s` is the time of the last
    use in seconds, for the time to live. `level`: its tier, 0 the fastest."""

    session: str
    size: int  # bytes
    entered: int
    used: int
    used_s: float
    level: int


class LRU:
    """The policy by which the least recently used session leaves a full tier first. A policy gives
    each session a rank, and the smallest rank leaves."""

    name: ClassVar[str] = "lru"

    def rank(self, item: PlacedSession, ticket: int | None, horizon: int) -> Rank:
        """Return the rank of a session (a stored conversation) in its tier: the smallest rank
        leaves first. `ticket`: the number of its waiting job in order of arrival, None without one.
        `horizon`: jobs with a ticket below it are within the window at which the policy looks
        ahead."""
        return 0, item.used

    def window(self, capacity: int, mean_size: float) -> int:
        """Return how many of the next waiting jobs the policy looks ahead at, where the tiers hold
        `capacity` bytes and a session has `mean_size` on average; 0 for none."""
        return 0


class FIFO(LRU):
    """The policy by which the session that came into its tier first leaves it first, used or not.
    What moves there from another tier counts as the last to come, so it always finds room."""

    name = "fifo"

    def rank(self, item: PlacedSession, ticket: int | None, horizon: int) -> Rank:
        return 0, item.entered


class SchedulerAware(LRU):
    """CachedAttention's policy, which looks ahead at as many waiting jobs as there are sessions
    that fit into the tiers.

    A session with a job in that window is kept. Among the others the least recently used one leaves
    first; where all have such a job, the one whose job is nearest the tail of the queue leaves."""

    name = "scheduler_aware"

    def rank(self, item: PlacedSession, ticket: int | None, horizon: int) -> Rank:
        return (0, item.used) if ticket is None or ticket >= horizon else (1, -ticket)

    def window(self, capacity: int, mean_size: float) -> int:
        return int(capacity / mean_size) if mean_size else 0


POLICIES: Mapping[str, type[LRU]] = {policy.name: policy for policy in (SchedulerAware, LRU, FIFO)}


class TierContents:
    """The sessions (stored conversations) that lie in the tier `name`, with a heap by the ranks of
    a policy: the lowest rank leaves first. A rank may rise without notice; where it falls, `push`
    must be called."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, capacity
        self.items: dict[str, PlacedSession] = {}
        self.bytes = 0
        # may hold ranks that rose since, and sessions that left
        self._heap: list[tuple[Rank, str]] = []

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
            lowest = {
                session: rank
                for rank, session in sorted(self._heap, reverse=True)
                if session in self.items
            }
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
    """An account of what lies on a disk of `capacity` bytes: names and sizes of the blocks in
    files, by session. The store and the simulator keep one each.

    A session that moves into memory leaves its files as a spare copy: that costs nothing while
    there is room, and saves writing them when the session comes back. Where room is needed, spare
    copies go first, the oldest before the others."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.bytes = capacity, 0
        self._blocks: dict[str, Mapping[Name, int]] = {}
        self._spare: OrderedDict[str, None] = OrderedDict()  # the first became one first

    def make_room(
        self, session: str, blocks: Mapping[Name, int], drop: Callable[[str], None]
    ) -> None:
        """Call `drop` for other sessions whose files are spare copies, since they lie in memory
        too, until `blocks`, all that `session` has, fit. Raise OSError where they do not fit and no
        spare copy is left."""
        more = sum(blocks.values()) - sum(self._blocks.get(session, {}).values())
        while self.bytes + more > self.capacity:
            spare = next((other for other in self._spare if other != session), None)
            if spare is None:
                raise OSError(errno.ENOSPC, "no room in the disk tier")
            drop(spare)

    def hold(self, session: str, blocks: Mapping[Name, int]) -> int:
        """Note that the session has just these `blocks` on disk now, sizes by name; return the
        bytes of those that it did not have before."""
        before = self._blocks.get(session, {})
        self._blocks[session] = blocks
        self.bytes += sum(blocks.values()) - sum(before.values())
        self._spare.pop(session, None)
        return sum(size for name, size in blocks.items() if name not in before)

    def spare(self, session: str) -> None:
        """Note that the session moved into memory, so that its files on disk are a spare copy from
        now on."""
        if session in self._blocks:
            self._spare[session] = None

    def drop(self, session: str) -> None:
        self.bytes -= sum(self._blocks.pop(session, {}).values())
        self._spare.pop(session, None)


class JobQueue:
    """A queue of the turns that wait to be served, one per session at most. A turn's ticket is its
    number in order of arrival. Turns may leave out of order, so the tickets of those that wait have
    gaps."""

    def __init__(self) -> None:
        self._jobs: dict[int, str] = {}
        self._order: list[int] = []  # the tickets of those that wait: the k-th one at once
        self._tickets: dict[str, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the sessions whose jobs wait, in order of arrival."""
        return iter(self._jobs.values())

    def join(self, session: str) -> None:
        self._tickets[session], self._jobs[self._next] = self._next, session
        self._order.append(self._next)
        self._next += 1

    def leave(self, session: str) -> None:
        """Remove the session's waiting job (a turn to be served), which starts or is given up."""
        ticket = self._tickets.pop(session)
        del self._jobs[ticket], self._order[bisect_left(self._order, ticket)]

    def ticket(self, session: str) -> int | None:
        """Return the number of the session's waiting job in order of arrival, or None where it has
        none."""
        return self._tickets.get(session)

    def horizon(self, count: int) -> int:
        """Return a ticket (a job's number in order of arrival) such that of all waiting jobs just
        the next `count` have smaller ones."""
        return self._order[count] if count < len(self._order) else self._next

    def between(self, start: int, end: int) -> list[str]:
        """Return the sessions whose waiting jobs have tickets (numbers in order of arrival) from
        `start` to below `end`."""
        places = (bisect_left(self._order, ticket) for ticket in (start, end))
        return [self._jobs[ticket] for ticket in self._order[slice(*places)]]


@dataclass(frozen=True, slots=True)
class Move:
    """The move of a session (a stored conversation) from one tier to another. `source` None: it
    comes from outside the store. `target` None: it leaves the store."""

    session: str
    source: str | None
    target: str | None
    size: int  # bytes


def in_order(moves: Sequence[Move]) -> list[Move]:
    """Sort moves between tiers into the order in which they are to be carried out: what comes from
    disk is first, because its files may make room there."""
    return sorted(moves, key=lambda move: move.source != DISK or move.target is None)


def without_copies(capacities: Mapping[str, int]) -> int:
    """Return how many of the disk's bytes stay free for sessions when it also keeps a copy of
    everything that the faster tiers can hold. `capacities`: bytes by tier. Raise `SettingsError`
    where nothing is left."""
    left = 2 * capacities[DISK] - sum(capacities.values())
    if left <= 0:
        raise SettingsError(
            "disk is too small for copies of what lies in memory: raise disk, or set copies=false."
        )
    return left


class Placement:
    """The record of which session (a stored conversation) lies in which tier; its methods return
    the moves that follow from a change, which the caller carries out as `in_order` says.
    `capacities`: bytes by tier; a tier of 0 bytes does not exist. `ttl_s`: seconds since its last
    use after which a session is dropped. `copies`: keep as many bytes of the disk free as the tiers
    above hold, for spare copies of their sessions."""

    def __init__(
        self, capacities: Mapping[str, int], policy: LRU, ttl_s: float = inf, copies: bool = False
    ) -> None:
        given = {name: capacities[name] for name in TIERS if capacities.get(name)}
        if copies and DISK in given:
            given[DISK] = without_copies(given)
        # the fastest tier first
        self.levels = [TierContents(name, size) for name, size in given.items()]
        self.names = list(given)
        self.policy, self.ttl_s = policy, ttl_s
        self.queue = JobQueue()
        self.items: OrderedDict[str, PlacedSession] = OrderedDict()  # least recently used first
        self._waiting_capacity = sum(size for name, size in given.items() if name != DEVICE)
        self._ticks = self._bytes = 0
        # the window's end, where it was farthest since ranks were last put right
        self._farthest = 0

    def tier(self, session: str) -> str | None:
        item = self.items.get(session)
        return self.names[item.level] if item else None

    @property
    def mean_size(self) -> float:
        return self._bytes / len(self.items) if self.items else 0.0

    def save(self, session: str, size: int, now_s: float, fastest: str | None = None) -> list[Move]:
        """Put the session, which has `size` bytes now, into the fastest tier that can hold it,
        though none faster than `fastest`. Return the moves that follow, those of sessions that make
        way included."""
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
        """Bring the session whose job starts now into the fastest tier that can hold it. Return the
        moves that follow."""
        item = self.items[session]
        self._touch(item, now_s)
        self.levels[item.level].push(item, self.rank(item))
        return self._raise(item, 0)

    def prefetch(self) -> Iterator[list[Move]]:
        """Bring the sessions of the next waiting jobs from disk into host memory, where nothing
        more valuable has to give way. Yield the moves for one session at a time; carry them out
        before asking for the next."""
        if HOST not in self.names or DISK not in self.names:
            return
        level = self.names.index(HOST)
        for session in list(
            islice(self.queue, self.policy.window(self.levels[level].capacity, self.mean_size))
        ):
            item = self.items.get(session)
            if item and item.level > level:
                moves = self._raise(item, level)
                if not moves:
                    return
                yield moves

    def expire(self, now_s: float) -> list[Move]:
        """Drop all sessions that were not used for `ttl_s` seconds; return their moves out of the
        store."""
        moves: list[Move] = []
        while (
            self.items and now_s - (oldest := next(iter(self.items.values()))).used_s > self.ttl_s
        ):
            moves += self.drop(oldest.session)
        return moves

    def shrink(self, session: str, size: int) -> None:
        """Note that the session has only `size` bytes now; it stays in its tier."""
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
        """Tell the tiers which sessions have a lower rank now. Where sessions grow, fewer fit into
        the tiers, so the policy looks ahead at fewer waiting jobs, and sessions whose jobs are no
        longer among them may leave sooner."""
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
        """Move the session into the first tier from `level` on that has room for it and is faster
        than its own; return the moves. It stays where it is if there is none."""
        moves: list[Move] = []
        tier = self.levels[item.level]
        tier.remove(item)  # so that what makes way may have its place
        self._place(item, level, tier.name, moves)
        return moves

    def _place(
        self, item: PlacedSession, level: int, source: str | None, moves: list[Move]
    ) -> None:
        """Move the session into the first tier from `level` on (0 is the fastest) that takes it, or
        else out of the store. Append what moves to `moves`."""
        for slower in range(level, len(self.levels)):
            if self._make_room(slower, item, moves):
                self._settle(item, slower, source, moves)
                return
        moves.append(self._out(item, source))

    def _make_room(self, level: int, item: PlacedSession, moves: list[Move]) -> bool:
        """Move sessions of lower rank out of the tier `level` until the session `item` fits, and
        append these moves to `moves`. Return False, and move nothing, where only higher ranks are
        left."""
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

    def _settle(
        self, item: PlacedSession, level: int, source: str | None, moves: list[Move]
    ) -> None:
        item.level = level
        tier = self.levels[level]
        tier.add(item, self.rank(item))
        if tier.name != source:
            moves.append(Move(item.session, source, tier.name, item.size))

    def _out(self, item: PlacedSession, source: str | None) -> Move:
        del self.items[item.session]
        self._bytes -= item.size
        return Move(item.session, source, None, item.size)
