"""The sessions of one tier and their bytes, and the one that leaves first; the files that a disk holds of sessions."""

from __future__ import annotations

import errno
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from harness.cachedattention.store.policies import PlacedSession, Rank

SLACK = 64  # stale entries of the heap that are not worth a new one
Name = TypeVar("Name", bound=Hashable)


class Level:
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


class Files(Generic[Name]):
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
