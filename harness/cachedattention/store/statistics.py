"""Counts of what a store of conversations was asked for and what that cost, and speeds that it has
measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import ceil
from typing import Any


@dataclass
class Statistics:
    """The counts of one store of conversations. Of sessions (stored conversations), `dropped` left
    for lack of room or by age, `refused` were too large or not worth a place when they were saved,
    `lost` fell to damaged files and errors of the disk.

    Seconds: `load_s` in which keys and values were on their way to turns, `hidden_s` of them while
    these computed or had not begun, `exposed_s` in which turns waited for them. Callers waited
    `write_waits` times, `write_wait_s` in all, because a write buffer was full."""

    lookups: int = 0
    hits: Counter[str] = field(default_factory=Counter)  # by tier
    asked_tokens: int = 0
    reused_tokens: int = 0
    dropped: int = 0
    refused: int = 0
    lost: int = 0
    # bytes of sessions, by tiers
    moved: Counter[tuple[str | None, str]] = field(default_factory=Counter)
    # to files; less than what moved there, for spare copies are not written again
    written_bytes: int = 0
    read_bytes: int = 0
    load_s: float = 0.0
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    write_waits: int = 0
    write_wait_s: float = 0.0

    def found(self, tier: str, tokens: int, count: int = 1) -> None:
        """Count a hit in `tier` that reuses `tokens`; `count` -1 takes one back, whose rows proved
        to be unreadable."""
        self.hits[tier] += count
        self.reused_tokens += count * tokens

    def plain(self) -> dict[str, Any]:
        moved = {
            f"{source or 'new'}->{target}": size for (source, target), size in self.moved.items()
        }
        return vars(self) | {"hits": dict(self.hits), "moved": moved}


class MeasuredSpeeds:
    """Hold measured speeds of loading and of prefill, and compute the size of the read buffer from
    them: of what is loaded before a turn begins to compute (CachedAttention, section 3.2.1).

    It is S_buf = B (T_load L_hist - T_pref L_new) bytes: what is loaded in the time by which
    loading takes longer than the prefill of the new tokens. B is the bandwidth from a tier, T_load
    and T_pref are seconds per token, L_hist and L_new are numbers of tokens: of the history, and
    new ones."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._loading_s: dict[str, float] = {}
        self._tokens = 0
        self._prefill_s = 0.0

    def loaded(self, tier: str, size: int, seconds: float) -> None:
        self._bytes[tier] += size
        self._loading_s[tier] = self._loading_s.get(tier, 0.0) + seconds

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Note that the prefill of `tokens` new tokens took `seconds`, without the time of waiting
        for rows."""
        self._tokens += tokens
        self._prefill_s += seconds

    def read_buffer(self, tier: str, size: int, layers: int, new: int) -> int:
        """Return how many of the `layers` layers to load before a turn begins, for a stored history
        of `size` bytes in `tier` and `new` tokens to compute. Before the first measurement these
        are all layers."""
        loading_s = self._loading_s.get(tier, 0.0)
        if not (loading_s and self._tokens):
            return layers
        buffer = size - self._bytes[tier] / loading_s * self._prefill_s / self._tokens * new
        return max(0, min(layers, ceil(buffer / size * layers)))
