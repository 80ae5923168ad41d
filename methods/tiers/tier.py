"""Lists the tiers, the places where keys and values may lie: device, host memory and disk. Whatever
holds, counts, stores or shows bytes by tier reads this table, and it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

DEVICE, HOST, DISK = "device", "host", "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Describe a place where keys and values may lie.

    `rows`: the class that holds rows there, with its module. `in_files`: its bytes are those of
    files, not of tensors. `head`: the heading of the column of its bytes in a table; `meaning`:
    what that column shows. `stamp`: the letter that marks a table row with bytes there while the
    device is a CPU, and its meaning."""

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
        stamp=(
            "H",
            "host tier in the device's own memory: traffic is counted, the bus is not real",
        ),
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
    """Return the tier of this name. Raises `ValueError` if there is none."""
    if name not in TIERS:
        raise ValueError(
            f"{name!r} is not a tier: choose one of {', '.join(TIERS)}, or add its line to methods/tiers/tier.py."
        )
    return TIERS[name]


def bytes_key(name: str) -> str:
    """Return the name under which records and summaries hold the bytes in the tier `name`."""
    return f"kv_{name}_bytes"
