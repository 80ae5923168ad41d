"""Holds keys and values of one layer, in two kinds of containers.

`KVStore` holds what decode steps write, as plain rows on the device; a `Pool` holds tokens that are
read in part or seldom, in the tier (device, host memory, disk) and the codec that the request
names."""

from __future__ import annotations

from methods.pools.device_store import KVStore, PerHeadStore
from methods.pools.per_head import PerHeadPool
from methods.pools.pool import Pool, rows_for

__all__ = ["KVStore", "PerHeadPool", "PerHeadStore", "Pool", "rows_for"]
