"""Holds numbers that differ between the sequences of a step, as lengths and budgets do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from kernels.step_inputs import record_input


class Each:
    """Holds a whole number for each sequence. Sums and the like are made sequence by sequence.

    `dead`: the last so many are no sequences but slots that are free, whose numbers are zero and stay so. A step with
    such slots, even with none of them free, is of a size: its numbers are told as such, and `most` is a power of two.
    """

    def __init__(self, values: Sequence[int], dead: int | None = None) -> None:
        self.values, self.dead = (*values, *(0,) * (dead or 0)), dead
        self._on: dict[torch.device, Tensor] = {}
        self._results: dict[tuple[Callable[[int, int], int], int | Each], Each] = {}

    @cached_property
    def most(self) -> int:
        """Return a number that none of them exceeds."""
        largest = max(self.values)
        return largest if self.dead is None or largest < 1 else 1 << (largest - 1).bit_length()

    def __len__(self) -> int:
        return len(self.values)

    def on(self, device: torch.device) -> Tensor:
        """Return the numbers as [B] int64, the same tensor for every call."""
        if device not in self._on:
            self._on[device] = torch.tensor(self.values, device=device)
        return record_input(("numbers", self.most), self._on[device])

    def __iter__(self) -> Iterator[int]:
        return iter(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Each) and (self.values, self.dead) == (other.values, other.dead)

    def __repr__(self) -> str:
        return ", ".join(map(str, self.values))

    def __hash__(self) -> int:
        return hash(self.values)

    def __add__(self, other: int | Each) -> Each:
        return self._with(int.__add__, other)

    __radd__ = __add__

    def __mul__(self, other: int) -> Each:
        return self._with(int.__mul__, other)

    def __floordiv__(self, other: int) -> Each:
        return self._with(int.__floordiv__, other)

    def __sub__(self, other: int | Each) -> Each:
        return self._with(int.__sub__, other)

    def __rsub__(self, other: int) -> Each:
        return self._with(int.__rsub__, other)

    def _with(self, operate: Callable[[int, int], int], other: int | Each) -> Each:
        """Return the results of each number with `other`, the same object each time: what a step computes is then on
        the device already when the next one asks."""
        if (operate, other) not in self._results:
            others = other.values if isinstance(other, Each) else (other,) * len(self)
            results = tuple(map(operate, self.values, others))
            self._results[operate, other] = Each(results[: len(self) - (self.dead or 0)], self.dead)
        return self._results[operate, other]


class Counted(Each):
    """Holds numbers that the device has computed, [B] int64, up to `most`. Asking for `values` waits for the device."""

    def __init__(self, numbers: Tensor, most: int) -> None:
        self._numbers, self.most, self.dead = numbers, most, None

    def on(self, device: torch.device) -> Tensor:
        return self._numbers.to(device)

    @cached_property
    def values(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self._numbers.tolist())

    def __len__(self) -> int:
        return len(self._numbers)


def each(values: Sequence[int], dead: int | None = None) -> int | Each:
    """Return the number that all sequences share, or one for each of them, and for free slots if there may be some."""
    return values[0] if dead is None and len(set(values)) == 1 else Each(values, dead)


def per_sequence(number: int | Each, count: int) -> tuple[int, ...]:
    """Return the number of each of `count` sequences."""
    return number.values if isinstance(number, Each) else (number,) * count
