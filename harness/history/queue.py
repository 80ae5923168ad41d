"""The sessions whose jobs wait, in the order in which the jobs will run."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import islice


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

    def first(self, count: int) -> Iterator[str]:
        """The sessions of the next `count` jobs."""
        return islice(self, count)
