"""Holds numbers that differ between the sequences of a step, such as lengths and budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from kernels.step_inputs import record_input, to_device


class PerSequence:
    """Hold one whole number per sequence; arithmetic works sequence by sequence.

    `dead`: how many of the last entries are free slots, which fill a batch up to a fixed size;
    their numbers are and stay zero. If `dead` is not None (0 is allowed), the numbers belong to a
    step of such a fixed size: they are recorded as its inputs (`record_input`), and `most` is
    rounded up to a power of two, so that the step, once captured, can serve other sequences."""

    def __init__(self, values: Sequence[int], dead: int | None = None) -> None:
        self.values, self.dead = (*values, *(0,) * (dead or 0)), dead
        self._on: dict[torch.device, Tensor] = {}
        self._results: dict[tuple[Callable[[int, int], int], int | PerSequence], PerSequence] = {}

    @cached_property
    def most(self) -> int:
        """Return an upper bound of the numbers: the largest, or the next power of two in a step of
        fixed size."""
        largest = max(self.values)
        return largest if self.dead is None or largest < 1 else 1 << (largest - 1).bit_length()

    def __len__(self) -> int:
        return len(self.values)

    def on(self, device: torch.device) -> Tensor:
        """Return the numbers as a tensor [B] int64 on `device`, the same tensor for every call."""
        if device not in self._on:
            self._on[device] = to_device(self.values, device)
        return record_input(("numbers", self.most), self._on[device])

    def __iter__(self) -> Iterator[int]:
        return iter(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerSequence) and (self.values, self.dead) == (
            other.values,
            other.dead,
        )

    def __repr__(self) -> str:
        return ", ".join(map(str, self.values))

    def __hash__(self) -> int:
        return hash(self.values)

    def __add__(self, other: int | PerSequence) -> PerSequence:
        return self._with(int.__add__, other)

    __radd__ = __add__

    def __mul__(self, other: int) -> PerSequence:
        return self._with(int.__mul__, other)

    def __floordiv__(self, other: int) -> PerSequence:
        return self._with(int.__floordiv__, other)

    def __sub__(self, other: int | PerSequence) -> PerSequence:
        return self._with(int.__sub__, other)

    def __rsub__(self, other: int) -> PerSequence:
        return self._with(int.__rsub__, other)

    def _with(self, operate: Callable[[int, int], int], other: int | PerSequence) -> PerSequence:
        """Return a new `PerSequence` with `operate(number, other)` for each number. The result is
        cached: its numbers stay on the device, where the next step with the same operands finds
        them."""
        if (operate, other) not in self._results:
            others = other.values if isinstance(other, PerSequence) else (other,) * len(self)
            results = tuple(map(operate, self.values, others))
            self._results[operate, other] = PerSequence(
                results[: len(self) - (self.dead or 0)], self.dead
            )
        return self._results[operate, other]


class CountedOnDevice(PerSequence):
    """Hold numbers [B] int64, one per sequence, that the device has computed and the host does not
    know; none is above `most`. Reading `values` waits for the device."""

    def __init__(self, numbers: Tensor, most: int) -> None:
        self._numbers, self.most, self.dead = numbers, most, None

    def on(self, device: torch.device) -> Tensor:
        return self._numbers.to(device)

    @cached_property
    def values(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self._numbers.tolist())

    def __len__(self) -> int:
        return len(self._numbers)


def per_sequence(values: Sequence[int], dead: int | None = None) -> int | PerSequence:
    """Return the number as an int if all sequences have the same one, else a `PerSequence`; always
    the latter if `dead`, the count of free slots, is given."""
    return values[0] if dead is None and len(set(values)) == 1 else PerSequence(values, dead)


def most_of(number: int | PerSequence) -> int:
    """Return a number that is the same for all sequences, or an upper bound of those of each."""
    return number.most if isinstance(number, PerSequence) else number


def values_per_sequence(number: int | PerSequence, count: int) -> tuple[int, ...]:
    """Return `count` numbers, one per sequence; a plain int counts for all of them."""
    return number.values if isinstance(number, PerSequence) else (number,) * count
