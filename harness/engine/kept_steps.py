"""Captured steps that are kept for other sequences of their size."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kernels.ragged import Ragged
from kernels.told import StepInputs


class Sized(Protocol):
    """What steps as others do (`SlotsCache`): `told` holds what its first step was told."""

    told: StepInputs | None

    @property
    def form(self) -> Hashable: ...


class KeptStep(NamedTuple):
    """A captured step: what it takes, what it gives, and what it was told of its sequences, which may be overwritten.
    `joined` is what its policies have joined of their sequences, `results` where they leave what they chose."""

    token: Tensor
    logits: Tensor
    replay: Callable[[], Any]
    told: StepInputs
    joined: list[dict[str, Tensor]]
    results: list[dict[str, Tensor | Ragged]]


class KeptSteps:
    """All that one engine has captured: of each number of slots, of methods and kinds of layers, and of powers of two
    of lengths and budgets."""

    def __init__(self) -> None:
        self._steps: dict[Hashable, list[KeptStep]] = {}

    def of(self, cache: Sized) -> KeptStep | None:
        """A step that serves the sequences of `cache` from now on, which have taken their first, or None."""
        return next((step for step in self._alike(cache) if cache.told and step.told.take_over(cache.told)), None)

    def keep(self, cache: Sized, step: KeptStep) -> None:
        self._alike(cache).append(step)

    def _alike(self, cache: Sized) -> list[KeptStep]:
        assert cache.told is not None
        return self._steps.setdefault((cache.form, tuple(cache.told.kinds)), [])
