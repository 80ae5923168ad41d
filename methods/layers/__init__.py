"""Ready-made layers, so that most methods are one function.

`DenseLayer` keeps and reads everything. `EvictLayer` keeps a choice at the seal (`keep`). `ChoosingLayer` keeps
everything and reads a choice per step; `SelectLayer` is the usual kind: sinks, window and single tokens (`select`);
`PooledLayer` is one whose tokens compete for the room of a pool.
"""

from __future__ import annotations

from methods.layers.choosing import ChoosingLayer
from methods.layers.dense import DenseLayer
from methods.layers.evict import EvictLayer
from methods.layers.indices import between_ends, gather_per_head, sinks_and_recent, union_per_kv_head
from methods.layers.pooled import PooledLayer
from methods.layers.select import SelectLayer

__all__ = [
    "ChoosingLayer",
    "DenseLayer",
    "EvictLayer",
    "PooledLayer",
    "SelectLayer",
    "between_ends",
    "gather_per_head",
    "sinks_and_recent",
    "union_per_kv_head",
]
