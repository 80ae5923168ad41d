"""Writes down what the host tells a step about its sequences, so that a captured step can serve other ones.

Where sequences lie, how many tokens they have and what else differs between them comes to a step as small tensors
(`Ragged`, `Each`); all else about it is the same for sequences of one size. A captured step therefore serves others
once these tensors, in the order in which the step asks for them, hold what such a step tells of the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

MOST_KEPT_BYTES = 256 << 20  # of captured steps that are kept for others


class CaptureError(RuntimeError):
    """Says that a step did something that cannot be captured, and what."""


class StepInputs:
    """Holds the tensors that one step was told, and of each what kind it is: a step of other kinds is another one."""

    def __init__(self) -> None:
        self.kinds: list[Hashable] = []
        self.tensors: list[Tensor] = []
        self.read_memory = False  # an operation took a sequence's own memory, where no table can point elsewhere

    def add(self, kind: Hashable, tensor: Tensor) -> None:
        self.kinds.append((kind, tuple(tensor.shape), tensor.dtype, tensor.device))
        self.tensors.append(tensor)

    def take_over(self, other: StepInputs) -> bool:
        """Copy what another step of the same kinds was told into the tensors of this one. Return whether that can be:
        not where this step asked for one number twice and the other one for two."""
        contents: dict[int, tuple[Tensor, Tensor]] = {}
        for held, told in zip(self.tensors, other.tensors, strict=True):
            if contents.setdefault(id(held), (held, told))[1] is not told:
                return False
        held_ones, told_ones = zip(*contents.values(), strict=True)
        torch._foreach_copy_(held_ones, told_ones)
        return True


_telling: ContextVar[StepInputs | None] = ContextVar("telling", default=None)


@contextmanager
def telling(told: StepInputs) -> Iterator[None]:
    """Write down what is told to the step that runs here."""
    token = _telling.set(told)
    try:
        yield
    finally:
        _telling.reset(token)


def tell(kind: Hashable, tensor: Tensor) -> Tensor:
    """Return a tensor, about which the step that runs is told."""
    if (told := _telling.get()) is not None:
        told.add(kind, tensor)
    return tensor


def note_memory() -> None:
    """Say that an operation takes the memory of a sequence itself."""
    if (told := _telling.get()) is not None:
        told.read_memory = True
