"""Counts bytes that move between tiers, where they move."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

TALLIED = ("to_device_bytes", "looked_up", "found")
COUNTED = ("to_device_bytes", "to_host_bytes", "from_disk_bytes", "looked_up", "found", "exposed_s", "hidden_s")


@dataclass
class Traffic:
    """Counts bytes that crossed between host and device. What goes to a disk and comes from it passes through the host,
    and is counted there as well."""

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    from_disk_bytes: int = 0
    looked_up: int = 0  # rows that a cache on the device was asked for
    found: int = 0  # rows of these that it had
    exposed_s: float = 0.0  # for which the model stood still until rows had come to the device
    hidden_s: float = 0.0  # in which rows came while it computed
    several: bool = False  # of sequences that step together, each by itself
    tallies: dict[str, Tensor] = field(default_factory=dict)  # what the device alone knows of these, until `settle`

    @property
    def total_bytes(self) -> int:
        return self.to_device_bytes + self.to_host_bytes

    def add(self, other: Traffic) -> None:
        """Count what another has counted as well."""
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, amount in other.tallies.items():
            self.tally(name, amount)

    def less(self, before: Traffic) -> Traffic:
        """Return what has been counted in Python since `before`, without times: they are of that once."""
        counted = {name: getattr(self, name) - getattr(before, name) for name in COUNTED[:-2]}
        return Traffic(**counted)

    def tally(self, name: str, amount: Tensor) -> None:
        """Count an `amount` that the device alone knows, without waiting for it: [], or [B] for sequences that step
        together. The tensor that holds the sum stays the same, so that steps which are captured and replayed count
        too."""
        if name in self.tallies:
            self.tallies[name] += amount
        else:
            self.tallies[name] = amount.clone()

    @classmethod
    def batched(cls, batch: int, device: torch.device) -> Traffic:
        """Return what counts for `batch` sequences that step together, each by itself."""
        tallies = {name: torch.zeros(batch, dtype=torch.int64, device=device) for name in TALLIED}
        return cls(tallies=tallies, several=True)

    def tally_each(self, name: str, amounts: Tensor) -> None:
        """Tally amounts [B] of sequences: each by itself, if they step together, else their sum."""
        self.tally(name, amounts if self.several else amounts.sum())

    def hand_over(self, sequences: slice, to: Traffic) -> None:
        """Let another count what has been tallied here for some of several sequences."""
        for name, sums in self.tallies.items():
            to.tally(name, sums[sequences].sum())
            sums[sequences] = 0

    @torch.inference_mode()
    def settle(self) -> Traffic:
        """Return this, with all counts in Python now. Waits for the device where it knew more."""
        for name, sum_ in self.tallies.items():
            setattr(self, name, getattr(self, name) + int(sum_))
            sum_.zero_()
        return self

    def copy(self) -> Traffic:
        """Return what is counted now, which further counting leaves as it is."""
        return replace(self.settle(), tallies={})
