"""Which members of a running batch take a layer's step together."""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor

from methods.base import KVLayer
from methods.layers import Layer


class StepGroup(NamedTuple):
    """Members whose sequences take a layer's step together, or one member alone."""

    layer: KVLayer
    members: tuple[int, ...]
    rows: Tensor | slice  # of these members and of free slots, among those of all
    joint: bool


class Attending(NamedTuple):
    """How one member attends: in some layers alone, in others by the layer that it shares."""

    alone: list[KVLayer]
    together: list[tuple[Layer, Layer]]  # its own layer, and the shared one
    first: dict[int, int]  # where its sequences begin among those of a shared layer, by that layer's id
    lags: bool  # all of the method's layers are shared


def shared_layer(group: StepGroup) -> Layer:
    """The layer that a group shares."""
    return cast(Layer, group.layer)
