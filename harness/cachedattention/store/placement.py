"""The bookkeeping of which session (a stored conversation) lies in which tier, as a policy wants it
(CachedAttention, section 3.3).

A session lies in one tier, whole. What leaves a tier goes to the next slower one; what leaves the
last one is gone. The store carries the moves out; the simulator counts and times them. Nothing here
holds a tensor."""

from __future__ import annotations

import errno
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from harness.config.values import SettingsError
from methods.tiers.tier import DEVICE, DISK, HOST, TIERS


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


@dataclass(frozen=True, slots=True)
class Policy:
    """Say which session leaves a full tier first: the one with the smallest tick `order`, that of its
    last use or that at which it entered its tier. By the latter, what moves there from another tier
    is the last to come, so it always finds room. `looks_ahead`: a session with a job among the next
    waiting ones is kept; if all have one, the session whose job is last in the queue leaves."""

    order: str = "used"
    looks_ahead: bool = False

    def window(self, capacity: int, mean_size: float) -> int:
        """Return how many of the next waiting jobs the policy looks ahead at: as many as there are
        sessions that fit into the tiers, if these hold `capacity` bytes and a session has
        `mean_size` on average."""
        return int(capacity / mean_size) if self.looks_ahead and mean_size else 0


USUAL = "scheduler_aware"  # CachedAttention's
POLICIES = {USUAL: Policy(looks_ahead=True), "lru": Policy(), "fifo": Policy("entered")}


class TierContents:
    """The sessions (stored conversations) that lie in the tier `name`. `order` names the tick by which they leave it,
    unless a job that waits keeps them."""

    def __init__(self, name: str, capacity: int, order: str) -> None:
        self.name, self.capacity, self.order = name, capacity, order
        self.items: dict[str, PlacedSession] = {}
        self.bytes = 0
        self.ticks: list[tuple[int, str]] = []  # ascending, with their sessions

    @property
    def free(self) -> int:
        return self.capacity - self.bytes

    def add(self, item: PlacedSession) -> None:
        self.items[item.session] = item
        self.bytes += item.size
        insort(self.ticks, (getattr(item, self.order), item.session))

    def remove(self, item: PlacedSession) -> None:
        del self.items[item.session]
        self.bytes -= item.size
        del self.ticks[bisect_left(self.ticks, (getattr(item, self.order), item.session))]


class DiskAccount:
    """Keep account of what lies on a disk of `capacity` bytes: names and sizes of the blocks in
    files, by session. The store and the simulator keep one each.

    When a session moves into memory, its files stay as a spare copy. That costs nothing while there
    is room, and saves writing them when the session comes back. When room is needed, spare copies
    go first, the oldest before the others."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.bytes = capacity, 0
        self._blocks: dict[str, Mapping[str, int]] = {}
        self._spare: OrderedDict[str, None] = OrderedDict()  # the first became one first

    def make_room(
        self, session: str, blocks: Mapping[str, int], drop: Callable[[str], None]
    ) -> None:
        """Drop spare copies of other sessions, which lie in memory too, until `blocks`, all that
        `session` has, fit on the disk; `drop` is called for each. Raise OSError if they do not fit
        and no spare copy is left."""
        more = sum(blocks.values()) - sum(self._blocks.get(session, {}).values())
        while self.bytes + more > self.capacity:
            spare = next((other for other in self._spare if other != session), None)
            if spare is None:
                raise OSError(errno.ENOSPC, "no room in the disk tier")
            drop(spare)

    def hold(self, session: str, blocks: Mapping[str, int]) -> int:
        """Note that the session now has exactly these `blocks` on disk, sizes by name. Return the
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
        self._order: list[int] = []  # the tickets of those that wait: the k-th one at once
        self.tickets: dict[str, int] = {}  # by session
        self._next = 0

    def __len__(self) -> int:
        return len(self.tickets)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the sessions whose jobs wait, in order of arrival."""
        return iter(self.tickets)

    def join(self, session: str) -> None:
        self.tickets[session] = self._next
        self._order.append(self._next)
        self._next += 1

    def leave(self, session: str) -> None:
        """Remove the session's waiting job (a turn to be served), which starts or is given up."""
        del self._order[bisect_left(self._order, self.tickets.pop(session))]

    def horizon(self, count: int) -> int:
        """Return a ticket (a job's number in order of arrival) such that exactly the next `count`
        waiting jobs have smaller ones."""
        return self._order[count] if count < len(self._order) else self._next


@dataclass(frozen=True, slots=True)
class Move:
    """Describe the move of a session (a stored conversation) from one tier to another. `source`
    None: it comes from outside the store. `target` None: it leaves the store."""

    session: str
    source: str | None
    target: str | None
    size: int  # bytes


def in_order(moves: Sequence[Move]) -> list[Move]:
    """Sort moves between tiers into the order in which they are to be carried out: what comes from
    disk is first, because its files may make room there."""
    return sorted(moves, key=lambda move: move.source != DISK or move.target is None)


class Placement:
    """The record of which session (a stored conversation) lies in which tier; its methods return
    the moves that follow from a change, which the caller carries out as `in_order` says.
    `capacities`: bytes by tier; a tier of 0 bytes does not exist. `ttl_s`: seconds since its last
    use after which a session is dropped. `copies`: keep as many bytes of the disk free as the tiers
    above hold, for spare copies of their sessions."""

    def __init__(
        self,
        capacities: Mapping[str, int],
        policy: Policy,
        ttl_s: float = inf,
        copies: bool = False,
    ) -> None:
        given = {name: capacities[name] for name in TIERS if capacities.get(name)}
        if copies and DISK in given:
            given[DISK] -= sum(size for name, size in given.items() if name != DISK)
            if given[DISK] <= 0:
                raise SettingsError(
                    "disk is too small for copies of what lies in memory: raise disk, or set copies=false."
                )
        # the fastest tier first
        self.levels = [TierContents(name, size, policy.order) for name, size in given.items()]
        self.names = list(given)
        self.policy, self.ttl_s = policy, ttl_s
        self.queue = JobQueue()
        self.items: OrderedDict[str, PlacedSession] = OrderedDict()  # least recently used first
        self._waiting_capacity = sum(size for name, size in given.items() if name != DEVICE)
        self._ticks = self._bytes = 0

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
        source, item = None, self.items.get(session)
        if item:
            source = self._resized(item, size).name
        else:
            item = self.items[session] = PlacedSession(session, size, self._ticks + 1, 0, 0.0, 0)
            self._bytes += size
        self._touch(item, now_s)
        return self._place(item, self.names.index(fastest) if fastest in self.names else 0, source)

    def use(self, session: str, now_s: float) -> list[Move]:
        """Bring the session whose job starts now into the fastest tier that can hold it. Return the
        moves that follow."""
        item = self.items[session]
        source = self._resized(item, item.size)
        self._touch(item, now_s)
        return self._place(item, 0, source.name)

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
                # taken out first, so that what makes way may have its place
                moves = self._place(item, level, self._resized(item, item.size).name)
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
        self._resized(item, size).add(item)

    def drop(self, session: str) -> list[Move]:
        item = self.items[session]
        return [self._out(item, self._resized(item, item.size).name)]

    def rank(self, item: PlacedSession) -> tuple[int, int]:
        """Return the rank of a session in its tier: the smallest leaves first."""
        horizon = self._horizon()
        ticket = self.queue.tickets.get(item.session, horizon)
        return (1, -ticket) if ticket < horizon else (0, getattr(item, self.policy.order))

    def lowest(self, tier: TierContents) -> PlacedSession:
        """Return the session of the smallest rank in a tier, which is not empty."""
        tickets, horizon = self.queue.tickets, self._horizon()
        leaving = (name for _, name in tier.ticks if tickets.get(name, horizon) >= horizon)
        session = next(leaving, None)
        return tier.items[session or max(tier.items, key=tickets.__getitem__)]

    def _horizon(self) -> int:
        """Return the ticket of the first waiting job at which the policy does not look ahead."""
        return self.queue.horizon(self.policy.window(self._waiting_capacity, self.mean_size))

    def _touch(self, item: PlacedSession, now_s: float) -> None:
        self._ticks += 1
        item.used, item.used_s = self._ticks, now_s
        self.items.move_to_end(item.session)

    def _resized(self, item: PlacedSession, size: int) -> TierContents:
        """Take the session out of its tier, which is returned, and note that it has `size` bytes now."""
        tier = self.levels[item.level]
        tier.remove(item)
        self._bytes += size - item.size
        item.size = size
        return tier

    def _place(self, item: PlacedSession, level: int, source: str | None) -> list[Move]:
        """Move the session from its tier `source`, which it has left, into the first one from `level` on (0 is the
        fastest) that takes it, or else out of the store. Return the moves that follow."""
        for slower, tier in enumerate(self.levels[level:], level):
            moves = self._make_room(slower, item)
            if moves is not None:
                item.level = slower
                tier.add(item)
                if tier.name != source:
                    moves.append(Move(item.session, source, tier.name, item.size))
                return moves
        return [self._out(item, source)]

    def _make_room(self, level: int, item: PlacedSession) -> list[Move] | None:
        """Move sessions of lower rank out of the tier `level` until the session `item` fits, and
        return these moves. Return None, and move nothing, where only higher ranks are left."""
        tier = self.levels[level]
        if item.size > tier.capacity:
            return None
        victims: list[PlacedSession] = []
        before = item.entered
        if level != item.level:
            item.entered = self._ticks = self._ticks + 1
        while tier.free < item.size:
            victim = self.lowest(tier)
            if self.rank(victim) > self.rank(item):
                item.entered = before
                for victim in victims:
                    tier.add(victim)
                return None
            tier.remove(victim)
            victims.append(victim)
        places = (self._place(victim, level + 1, tier.name) for victim in victims)
        return [move for moves in places for move in moves]

    def _out(self, item: PlacedSession, source: str | None) -> Move:
        del self.items[item.session]
        self._bytes -= item.size
        return Move(item.session, source, None, item.size)
