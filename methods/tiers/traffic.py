"""Counts bytes that move between tiers, where they move."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """Counts bytes that crossed between host and device. What goes to a disk and comes from it passes through the host,
    and is counted there as well."""

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    from_disk_bytes: int = 0
    looked_up: int = 0  # rows that a cache on the device was asked for
    found: int = 0  # rows of these that it had

    @property
    def total_bytes(self) -> int:
        return self.to_device_bytes + self.to_host_bytes
