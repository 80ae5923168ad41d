"""Policies that say which session leaves a full tier, and which are fetched ahead (CachedAttention, section 3.3).

Pure Python on sizes and the queue of waiting jobs: the store and the simulator use these very classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

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


class EvictionPolicy(ABC):
    """A policy by which the session of the smallest rank leaves first."""

    name: ClassVar[str]

    @abstractmethod
    def rank(self, item: PlacedSession, ticket: int | None, horizon: int) -> Rank:
        """Return the rank of a session. `ticket`: that of its waiting job, None without one; tickets below `horizon`
        are in the window."""

    def window(self, capacity: int, mean_size: float) -> int:
        """Return how many waiting jobs to look ahead at, over tiers that hold `capacity` bytes; 0 for none."""
        return 0


class SchedulerAware(EvictionPolicy):
    """CachedAttention's policy, with look-ahead windows over as many waiting jobs as there are sessions that fit.

    A session with a job in the window is exempt. Among the others the least recently used leaves first; where all
    are exempt, the one whose job is nearest the tail.
    """

    name = "scheduler_aware"

    def rank(self, item: PlacedSession, ticket: int | None, horizon: int) -> Rank:
        if ticket is None or ticket >= horizon:
            return 0, item.used
        return 1, -ticket

    def window(self, capacity: int, mean_size: float) -> int:
        return int(capacity / mean_size) if mean_size else 0


class LRU(EvictionPolicy):
    """The policy by which the least recently used session leaves first."""

    name = "lru"

    def rank(self, item: PlacedSession, ticket: int | None, horizon: int) -> Rank:
        return 0, item.used


class FIFO(EvictionPolicy):
    """The policy by which the session that has been in its tier for longest leaves first, used or not. What comes from
    another tier is the last one in, so it always finds room."""

    name = "fifo"

    def rank(self, item: PlacedSession, ticket: int | None, horizon: int) -> Rank:
        return 0, item.entered


POLICIES: Mapping[str, type[EvictionPolicy]] = {policy.name: policy for policy in (SchedulerAware, LRU, FIFO)}
