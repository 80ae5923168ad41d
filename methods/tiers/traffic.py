"""Defines `Traffic`, the counts of bytes that move between tiers, of rows that a cache on the device
had, and of samples that the budget cut short.

Bytes are added where they move: in methods/tiers/rows.py, and for sequences that step together in
methods/pools/batched.py. `moved_bytes_per_step` in the results is made in
harness/engine/batch/running_sequence.py (`finish`), from the counts before the first step and after
the last one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

TALLIED = ("to_device_bytes", "looked_up", "found")
COUNTED = (
    "to_device_bytes", "to_host_bytes", "from_disk_bytes", "looked_up", "found", "samples", "capped", "exposed_s",
    "hidden_s",
)  # fmt: skip


@dataclass
class Traffic:
    """Count bytes that crossed between host and device, in both directions. What goes to a disk or
    comes from it passes through the host, and is counted there as well. Counts that only the device
    knows wait in `tallies` until `settle`."""

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    from_disk_bytes: int = 0
    looked_up: int = 0  # rows that a cache on the device was asked for
    found: int = 0  # those of them that it had
    # that heads drew, each of as many tokens as its bound on the error asks (vAttention)
    samples: int = 0
    capped: int = 0  # those of them for which the budget allowed fewer draws
    exposed_s: float = 0.0  # seconds in which the model waited for rows to arrive on the device
    hidden_s: float = 0.0  # seconds in which rows arrived while it computed
    several: bool = False  # counts sequences that step together, each by itself
    # counts that are on the device, until `settle`
    tallies: dict[str, Tensor] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return self.to_device_bytes + self.to_host_bytes

    def add(self, other: Traffic) -> None:
        """Add all counts of `other` (moved bytes, rows asked for and found, seconds) to those of
        this object, including those that only the device knows."""
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, amount in other.tallies.items():
            self.tally(name, amount)

    def less(self, before: Traffic) -> Traffic:
        """Return what was counted since `before`: the differences of the counts, without times and
        without counts that only the device knows. For one captured step this is what each replay of
        it adds again."""
        counted = {name: getattr(self, name) - getattr(before, name) for name in COUNTED[:-2]}
        return Traffic(**counted)

    def tally(self, name: str, amount: Tensor) -> None:
        """Add `amount`, which only the device knows, to the count `name` without waiting for it: a
        tensor [], or [B] for sequences that step together. The tensor that holds the sum stays the
        same, so that replays of a captured step add to it as well."""
        if name in self.tallies:
            # a layer may lie on another GPU
            self.tallies[name] += amount.to(self.tallies[name].device)
        else:
            self.tallies[name] = amount.clone()

    @classmethod
    def batched(cls, batch: int, device: torch.device) -> Traffic:
        """Return an object that counts for `batch` sequences that step together, each by itself, in
        tensors [batch] on the device."""
        tallies = {name: torch.zeros(batch, dtype=torch.int64, device=device) for name in TALLIED}
        return cls(tallies=tallies, several=True)

    def tally_each(self, name: str, amounts: Tensor) -> None:
        """Add `amounts` [B], a number per sequence, to the count `name` on the device: for each
        sequence by itself if they step together, else their sum."""
        self.tally(name, amounts if self.several else amounts.sum())

    def hand_over(self, sequences: slice, to: Traffic) -> None:
        """Move what was counted on the device for the given ones of several sequences to `to`, the
        count of the cache that they belong to."""
        for name, sums in self.tallies.items():
            to.tally(name, sums[sequences].sum())
            sums[sequences] = 0

    @torch.inference_mode()
    def settle(self) -> Traffic:
        """Move all counts that only the device knew, such as moved bytes, into the Python numbers,
        waiting for the device if there are any. Return this object."""
        for name, sum_ in self.tallies.items():
            setattr(self, name, getattr(self, name) + int(sum_))
            sum_.zero_()
        return self

    def copy(self) -> Traffic:
        """Return a copy of these counts of moved bytes, all in Python; it waits for those that only
        the device knows (`settle`)."""
        return replace(self.settle(), tallies={})
