"""Keeps captured steps for other sequences of the same size."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kernels.ragged import Ragged
from kernels.step_inputs import MOST_KEPT_BYTES, StepInputs

MOST = 64


class Sized(Protocol):
    """Describe a cache whose steps other caches of its form can take (`SlotsCache`). `step_inputs`:
    the tensors that its first step recorded."""

    step_inputs: StepInputs | None

    @property
    def form(self) -> Hashable: ...


class KeptStep(NamedTuple):
    """Hold a captured step: its input `token`, its output `logits`, and `step_inputs`, the tensors
    that describe its sequences, into which the values of others may be written. `form` is the form
    of their caches. `joined` are tensors that policies joined for these sequences, as hit caches;
    `results` are those in which a step leaves what it chose."""

    token: Tensor
    logits: Tensor
    replay: Callable[[], Any]
    form: Hashable
    step_inputs: StepInputs
    joined: list[dict[str, Tensor]]
    results: list[dict[str, Tensor | Ragged]]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for layer in self.joined for x in layer.values())


class KeptSteps:
    """Keep captured steps of one engine that no sequences use at present, for sequences of the same
    size: as many slots, the same methods and kinds of layers, and the same powers of two of lengths
    and budgets. At most MOST steps and MOST_KEPT_BYTES are kept, those used last; the very last one
    stays however large it is."""

    def __init__(self) -> None:
        self._steps: list[KeptStep] = []  # in order of their last use

    def take(self, cache: Sized) -> KeptStep | None:
        """Return a captured step for the sequences of `cache`, which have taken their first step;
        None if none fits."""
        form, inputs = cache.form, cache.step_inputs
        assert inputs is not None
        for at, step in enumerate(self._steps):
            if step.form == form and step.step_inputs.kinds == inputs.kinds and step.step_inputs.take_over(inputs):
                return self._steps.pop(at)
        return None

    def give_back(self, step: KeptStep) -> list[KeptStep]:
        """Keep a step that its sequences no longer use. Return the steps that had to go for it."""
        self._steps.append(step)
        dropped: list[KeptStep] = []
        while len(self._steps) > MOST or (
            len(self._steps) > 1 and sum(kept.nbytes for kept in self._steps) > MOST_KEPT_BYTES
        ):
            dropped.append(self._steps.pop(0))
        return dropped
