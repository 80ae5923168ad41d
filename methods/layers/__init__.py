"""Holds `Layer`, which every method uses, and its policies: most methods are one function of one
policy.

`Layer` keeps and reads everything. A `Keep` says what stays of the prompt at the seal. A `Read`
chooses what a step reads: `Select` is the usual kind (sinks, window and single tokens), `Pooled`
one whose tokens compete for the room of a pool. A layer may have both."""

from __future__ import annotations

from methods.layers.ability_state import AbilityState
from methods.layers.indices import between_ends, ends, gather_per_head
from methods.layers.layer import Layer, PolicyMethod, RotatingMethod
from methods.layers.policy import Evict, Keep, Padded, Policy
from methods.layers.read import Read, Select
from methods.layers.storage import Storage

__all__ = [
    "AbilityState",
    "Evict",
    "Keep",
    "Layer",
    "Padded",
    "Policy",
    "PolicyMethod",
    "Read",
    "RotatingMethod",
    "Select",
    "Storage",
    "between_ends",
    "ends",
    "gather_per_head",
]
