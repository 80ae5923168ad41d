"""Counts bytes that move between tiers, where they move."""

from __future__ import annotations

from dataclasses import dataclass, fields


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

    @property
    def total_bytes(self) -> int:
        return self.to_device_bytes + self.to_host_bytes

    def add(self, other: Traffic) -> None:
        """Count what another has counted as well."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_COUNTS = tuple(field.name for field in fields(Traffic))  # looked up once: a step adds up several times per layer
