"""The bytes of a layer are those of every tensor it holds, wherever it keeps it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from harness.engine.footprint import footprint
from methods.base import CacheState
from methods.full import Full
from methods.layers import Layer
from methods.tiers.rows import HostRows, Place
from tests.methods.synthetic import Sequences, Shape

ROOM = 2 * 10 * 16 * 4  # K and V of the store
MINE = 4 * 32


@dataclass(slots=True)
class Slotted:
    kept: Tensor


class Private:
    __slots__ = ("__kept",)

    def __init__(self, kept: Tensor) -> None:
        self.__kept = kept


class Further(Slotted):
    """Its base class holds the tensor."""


class OnHost:
    tier = "host"

    def __init__(self, kept: Tensor) -> None:
        self.kept = [kept]


class Newcomer(Layer):
    diagnostics: ClassVar[tuple[str, ...]] = ("last_read",)


def layer() -> Any:
    """Its store takes memory with the first token."""
    s = Sequences(Shape(1, 1, 16), 10)
    made = Newcomer(s.specs[0], CacheState(s.request(None)), Full())
    made.take_in(s.at(0, 0, 1))
    return made


def closure(kept: Tensor) -> Callable[[], Tensor]:
    return lambda: kept


HOLDERS: list[Callable[[Tensor], Any]] = [
    lambda x: x, lambda x: [x], lambda x: {"a": (x,)}, lambda x: deque([x]), Slotted, Private, Further, closure,
    lambda x: partial(torch.add, x), lambda x: partial(torch.add, other=x), lambda x: Slotted(x).__repr__,
]  # fmt: skip


@pytest.mark.parametrize("held_in", HOLDERS)
def test_every_tensor_counts(held_in: Callable[[Tensor], Any]) -> None:
    made = layer()
    made.table = held_in(torch.zeros(32))
    assert footprint([made]) == {"device": ROOM + MINE, "host": 0, "disk": 0}


def test_what_a_layer_names_as_diagnostics_does_not_count() -> None:
    made = layer()
    made.last_read = [torch.zeros(32)]
    assert footprint([made]) == {"device": ROOM, "host": 0, "disk": 0}


def test_bytes_in_a_tier_that_nobody_knows_are_an_error() -> None:
    class Elsewhere(HostRows):
        tier = "elsewhere"

    made = layer()
    made.far = Elsewhere((1, 1, 4, 2), torch.float32, Place(torch.device("cpu")))
    with pytest.raises(ValueError, match="'elsewhere'"):
        footprint([made])


def test_views_count_once_and_a_tier_decides_for_what_it_holds() -> None:
    made = layer()
    made.far = OnHost(torch.zeros(32))
    made.first, made.second, made.itself = made.store.k_rows[:1], made.store.k, made
    assert footprint([made]) == {"device": ROOM, "host": MINE, "disk": 0}
