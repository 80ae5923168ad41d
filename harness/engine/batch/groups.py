"""Groups the members of a running batch that take a layer's step together."""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor

from methods.base import KVLayer
from methods.layers import Layer


class StepGroup(NamedTuple):
    """Hold one member, or several members whose sequences take a layer's step together."""

    layer: KVLayer
    members: tuple[int, ...]
    rows: Tensor | slice  # rows of these members and of free slots, among the rows of all members
    joint: bool


class Attending(NamedTuple):
    """Say how one member attends: alone in some layers, through a shared layer in the others."""

    alone: list[KVLayer]
    together: list[tuple[Layer, Layer]]  # its own layer, and the shared one
    first: dict[int, int]  # id of a shared layer -> the row in it with which this member's sequences begin
    lags: bool  # all layers of the method are shared


def shared_layer(group: StepGroup) -> Layer:
    """Return the layer that the members of a group share."""
    return cast(Layer, group.layer)
