"""What a store was asked and what it cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Statistics:
    """`dropped`: sessions that left for lack of room or by age; `refused`: too large or not worth a place when saved;
    `lost`: to damaged files and errors of the disk.

    `load_s`: in which rows were on their way to jobs, `hidden_s` of them while these computed or had not begun;
    `exposed_s`: in which jobs waited for them. `leaving_s`: in which rows were on their way from the device to host
    memory, `leaving_hidden_s` of them while no call of the store saved. `saving_s`: in which the disk was changed.
    Callers waited `write_waits` times, `write_wait_s` in all, as a write buffer was full.
    """

    lookups: int = 0
    hits: Counter[str] = field(default_factory=Counter)  # by tier
    asked_tokens: int = 0
    reused_tokens: int = 0
    shared_tokens: int = 0  # of these, found in another session
    dropped: int = 0
    refused: int = 0
    lost: int = 0
    moved: Counter[tuple[str | None, str]] = field(default_factory=Counter)  # bytes of sessions, by tiers
    written_bytes: int = 0  # to files; less than what moved there, for spare copies are not written again
    read_bytes: int = 0
    load_s: float = 0.0
    hidden_s: float = 0.0
    exposed_s: float = 0.0
    leaving_s: float = 0.0
    leaving_hidden_s: float = 0.0
    saving_s: float = 0.0
    write_waits: int = 0
    write_wait_s: float = 0.0

    def asked(self, tokens: int) -> None:
        self.lookups += 1
        self.asked_tokens += tokens

    def found(self, tier: str, tokens: int, count: int = 1) -> None:
        """`count` -1 takes it back."""
        self.hits[tier] += count
        self.reused_tokens += count * tokens

    def plain(self) -> dict[str, Any]:
        moved = {f"{source or 'new'}->{target}": size for (source, target), size in self.moved.items()}
        return vars(self) | {"hits": dict(self.hits), "moved": moved}
