"""How large the read buffer should be (CachedAttention, section 3.2.1), from what this process has measured."""

from __future__ import annotations

from collections import Counter
from math import ceil


class Speeds:
    """S_buf = B (T_load L_hist - T_pref L_new) bytes: what loading takes longer than the prefill of the new tokens is
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
        """`seconds` without those of waiting for rows."""
        self._tokens += tokens
        self._prefill_s += seconds

    def bandwidth(self, tier: str) -> float | None:
        """B, in bytes per second; None before anything was measured."""
        return self._bytes[tier] / seconds if (seconds := self._loading_s.get(tier, 0.0)) else None

    def prefill(self) -> float | None:
        """T_pref, in seconds per token; None before anything was measured."""
        return self._prefill_s / self._tokens if self._tokens else None

    def read_buffer(self, tier: str, size: int, layers: int, new: int) -> int:
        """In layers, for a history of `size` bytes (B T_load L_hist) and `new` tokens; all before the first measure."""
        bandwidth, prefill = self.bandwidth(tier), self.prefill()
        if bandwidth is None or prefill is None:
            return layers
        buffer = size - bandwidth * prefill * new
        return max(0, min(layers, ceil(buffer / size * layers)))
