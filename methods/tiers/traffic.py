"""Counts bytes that move between tiers, where they move."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

TALLIED = ("to_device_bytes", "looked_up", "found")
COUNTED = ("to_device_bytes", "to_host_bytes", "from_disk_bytes", "looked_up", "found", "exposed_s", "hidden_s")


@dataclass
class Traffic:
    """Count bytes that crossed between host and device. What goes to a disk and comes from it
    passes through the host, and is counted there as well."""

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    from_disk_bytes: int = 0
    looked_up: int = 0  # rows that a cache on the device was asked for
    found: int = 0  # those of them that it had
    exposed_s: float = 0.0  # seconds in which the model waited for rows to arrive on the device
    hidden_s: float = 0.0  # seconds in which rows arrived while it computed
    several: bool = False  # counts sequences that step together, each by itself
    tallies: dict[str, Tensor] = field(default_factory=dict)  # counts that are on the device, until `settle`

    @property
    def total_bytes(self) -> int:
        return self.to_device_bytes + self.to_host_bytes

    def add(self, other: Traffic) -> None:
        """Add the counts of another."""
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, amount in other.tallies.items():
            self.tally(name, amount)

    def less(self, before: Traffic) -> Traffic:
        """Return what was counted in Python since `before`, without times, which differ each
        time."""
        counted = {name: getattr(self, name) - getattr(before, name) for name in COUNTED[:-2]}
        return Traffic(**counted)

    def tally(self, name: str, amount: Tensor) -> None:
        """Count an `amount` that only the device knows, without waiting for it: [], or [B] for
        sequences that step together. The tensor that holds the sum stays the same, so that captured
        steps count as well."""
        if name in self.tallies:
            self.tallies[name] += amount
        else:
            self.tallies[name] = amount.clone()

    @classmethod
    def batched(cls, batch: int, device: torch.device) -> Traffic:
        """Return a count for `batch` sequences that step together, each by itself."""
        tallies = {name: torch.zeros(batch, dtype=torch.int64, device=device) for name in TALLIED}
        return cls(tallies=tallies, several=True)

    def tally_each(self, name: str, amounts: Tensor) -> None:
        """Tally amounts [B] of sequences: each by itself if they step together, else their sum."""
        self.tally(name, amounts if self.several else amounts.sum())

    def hand_over(self, sequences: slice, to: Traffic) -> None:
        """Move the tallies of some of several sequences to another count."""
        for name, sums in self.tallies.items():
            to.tally(name, sums[sequences].sum())
            sums[sequences] = 0

    @torch.inference_mode()
    def settle(self) -> Traffic:
        """Return this object with all counts in Python. Waits for the device if it has counted."""
        for name, sum_ in self.tallies.items():
            setattr(self, name, getattr(self, name) + int(sum_))
            sum_.zero_()
        return self

    def copy(self) -> Traffic:
        """Return a copy of the present counts."""
        return replace(self.settle(), tallies={})
