"""Holds the one table of tiers. Whatever holds, counts, stores or shows bytes by tier reads it, and it imports no
torch."""

from __future__ import annotations

from dataclasses import dataclass

DEVICE, HOST, DISK = "device", "host", "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Describes a place where keys and values may lie.

    `rows`: the class that holds rows there, with its module. `in_files`: its bytes are those of files, not of tensors.
    `head`: the heading of the column of its bytes in a table; `meaning`: what that column says. `stamp`: the letter of
    a table row that had bytes there while the device is a CPU, and what it then says.
    """

    rows: str
    head: str
    meaning: str
    in_files: bool = False
    stamp: tuple[str, str] | None = None


TIERS: dict[str, Tier] = {  # name -> tier, the fastest first
    DEVICE: Tier(
        rows="methods.tiers.rows.DeviceRows",
        head="KV dev",
        meaning="keys, values and indices on the device, the most of any example",
    ),
    HOST: Tier(
        rows="methods.tiers.rows.HostRows",
        head="KV host",
        meaning="the same in host memory",
        stamp=("H", "host tier in the device's own memory: traffic is counted, the bus is not real"),
    ),
    DISK: Tier(
        rows="methods.tiers.rows.DiskRows",
        head="KV disk",
        meaning="the same in files",
        in_files=True,
        stamp=(
            "D",
            "disk tier beside a CPU: its files were read, if not from the system's cache, and no bus led to a device",
        ),
    ),
}


def tier_of(name: str) -> Tier:
    """Return a tier's line of the table. Raises `ValueError` for a tier that has none."""
    if name not in TIERS:
        raise ValueError(
            f"{name!r} is no tier: choose one of {', '.join(TIERS)}, or add its line to methods/tiers/tier.py."
        )
    return TIERS[name]


def bytes_key(name: str) -> str:
    """Return the key under which records and summaries hold the bytes of a tier."""
    return f"kv_{name}_bytes"
