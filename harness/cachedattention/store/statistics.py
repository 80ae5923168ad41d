"""Counts of what a store was asked and what it cost, and speeds that it has measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import ceil
from typing import Any


@dataclass
class Statistics:
    """The counts of one store. `dropped`: sessions that left for lack of room or by age; `refused`: too large or not
    worth a place when saved; `lost`: to damaged files and errors of the disk.

    `load_s`: in which rows were on their way to jobs, `hidden_s` of them while these computed or had not begun;
    `exposed_s`: in which jobs waited for them. Callers waited `write_waits` times, `write_wait_s` in all, as a write
    buffer was full.
    """

    lookups: int = 0
    hits: Counter[str] = field(default_factory=Counter)  # by tier
    asked_tokens: int = 0
    reused_tokens: int = 0
    dropped: int = 0
    refused: int = 0
    lost: int = 0
    moved: Counter[tuple[str | None, str]] = field(default_factory=Counter)  # bytes of sessions, by tiers
    written_bytes: int = 0  # to files; less than what moved there, for spare copies are not written again
    read_bytes: int = 0
    load_s: float = 0.0
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    write_waits: int = 0
    write_wait_s: float = 0.0

    def found(self, tier: str, tokens: int, count: int = 1) -> None:
        """Count a hit; `count` -1 takes it back."""
        self.hits[tier] += count
        self.reused_tokens += count * tokens

    def plain(self) -> dict[str, Any]:
        moved = {f"{source or 'new'}->{target}": size for (source, target), size in self.moved.items()}
        return vars(self) | {"hits": dict(self.hits), "moved": moved}


class MeasuredSpeeds:
    """Measured speeds, and the size of the read buffer that follows from them (CachedAttention, section 3.2.1):
    S_buf = B (T_load L_hist - T_pref L_new) bytes: what loading takes longer than the prefill of the new tokens is
    loaded before the job begins. B is the bandwidth from a tier, T_load and T_pref are seconds per token."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._loading_s: dict[str, float] = {}
        self._tokens = 0
        self._prefill_s = 0.0

    def loaded(self, tier: str, size: int, seconds: float) -> None:
        self._bytes[tier] += size
        self._loading_s[tier] = self._loading_s.get(tier, 0.0) + seconds

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Note a prefill of `tokens` new tokens in `seconds`, without those of waiting for rows."""
        self._tokens += tokens
        self._prefill_s += seconds

    def read_buffer(self, tier: str, size: int, layers: int, new: int) -> int:
        """Return the read buffer in layers, for a history of `size` bytes (B T_load L_hist) and `new` tokens; all
        layers before the first measurement."""
        loading_s = self._loading_s.get(tier, 0.0)
        if not (loading_s and self._tokens):
            return layers
        buffer = size - self._bytes[tier] / loading_s * self._prefill_s / self._tokens * new
        return max(0, min(layers, ceil(buffer / size * layers)))
