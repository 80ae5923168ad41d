"""Captured steps that are kept for other sequences of their size."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kernels.ragged import Ragged
from kernels.told import MOST_KEPT_BYTES, StepInputs

MOST = 64


class Sized(Protocol):
    """What steps as others do (`SlotsCache`): `told` holds what its first step was told."""

    told: StepInputs | None

    @property
    def form(self) -> Hashable: ...


class KeptStep(NamedTuple):
    """A captured step: what it takes, what it gives, and what it was told of its sequences, which may be overwritten.
    `form` is that of their caches, `joined` what its policies have joined of them, as copies of hit caches, `results`
    where they leave what they chose, `own_bytes` what it computes in and shares with no other."""

    token: Tensor
    logits: Tensor
    replay: Callable[[], Any]
    form: Hashable
    told: StepInputs
    joined: list[dict[str, Tensor]]
    results: list[dict[str, Tensor | Ragged]]
    own_bytes: int

    @property
    def nbytes(self) -> int:
        return self.own_bytes + sum(x.nbytes for of_layer in self.joined for x in of_layer.values())


class KeptSteps:
    """What one engine has captured and nobody is using: of each number of slots, of methods and kinds of layers, and of
    powers of two of lengths and budgets. Those that were used last are kept: MOST of them, of MOST_KEPT_BYTES together,
    and the last one however large."""

    def __init__(self) -> None:
        self._steps: list[KeptStep] = []  # the one that was used last at the end

    def take(self, cache: Sized) -> KeptStep | None:
        """A step that serves the sequences of `cache` from now on, which have taken their first, or None."""
        form, told = cache.form, cache.told
        assert told is not None
        for at, step in enumerate(self._steps):
            if step.form == form and step.told.kinds == told.kinds and step.told.take_over(told):
                return self._steps.pop(at)
        return None

    def give_back(self, step: KeptStep) -> list[KeptStep]:
        """Keep a step that its sequences leave. -> those that are kept no longer"""
        self._steps.append(step)
        given_up: list[KeptStep] = []
        while len(self._steps) > MOST or (
            len(self._steps) > 1 and sum(one.nbytes for one in self._steps) > MOST_KEPT_BYTES
        ):
            given_up.append(self._steps.pop(0))
        return given_up
