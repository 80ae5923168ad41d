"""Holds keys and values: what is kept of them, and where.

`KVStore` holds what steps write, as plain rows on the device; a `Pool` holds the rest, in the tier
and the codec that the request names."""

from __future__ import annotations

from methods.pools.device_store import KVStore, PerHeadStore
from methods.pools.pool import Pool, rows_for

__all__ = ["KVStore", "PerHeadStore", "Pool", "rows_for"]
