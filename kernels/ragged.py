"""Names tensors of several sequences that differ in one size, so that one launch serves all of them.

Each sequence keeps its memory, and kernels read from a table where it begins. A page table (PagedAttention, arXiv
2309.06180) does the same for pages of one length; with one page per sequence its rows lie side by side, so that reading
them takes no further step, and nothing is copied when a sequence comes or goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, wraps
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

RAGGED = "takes sequences of one length"  # why a backend leaves unequal ones to another


class Each:
    """Holds a whole number for each sequence. Sums and the like are made sequence by sequence."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = tuple(values)
        self._on: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return the numbers as [B] int64, the same tensor for every call."""
        if device not in self._on:
            self._on[device] = torch.tensor(self.values, device=device)
        return self._on[device]

    def __iter__(self) -> Iterator[int]:
        return iter(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Each) and self.values == other.values

    def __repr__(self) -> str:
        return ", ".join(map(str, self.values))

    def __hash__(self) -> int:
        return hash(self.values)

    def __add__(self, other: int | Each) -> Each:
        others = other.values if isinstance(other, Each) else (other,) * len(self.values)
        return Each(tuple(map(int.__add__, self.values, others)))

    def __mul__(self, other: int) -> Each:
        return Each(tuple(value * other for value in self.values))

    def __floordiv__(self, other: int) -> Each:
        return Each(tuple(value // other for value in self.values))

    def __rsub__(self, other: int) -> Each:
        return Each(tuple(map(other.__sub__, self.values)))

    def __sub__(self, other: int | Each) -> Each:
        return self + (Each(tuple(map(int.__neg__, other.values))) if isinstance(other, Each) else -other)


class Ragged:
    """Holds a tensor [1 ...] of every sequence; they differ in dimension `dim` alone.

    `parts` are these tensors, `sizes` how long they are, and `table` [B 3] (int64) their addresses and the bytes from
    one entry of the second and of the third dimension to the next. `whole` [B ...] holds all of them, filled up behind
    the shorter ones with what nobody may read.
    """

    def __init__(self, parts: Sequence[Tensor], dim: int = 2) -> None:
        """Name tensors that stay where they are as long as this object lives."""
        self.parts, self.dim = parts, dim
        self.sizes = Each([part.shape[dim] for part in parts])

    @classmethod
    def filled_up(cls, whole: Tensor, sizes: Each, dim: int = 2) -> Ragged:
        """Name the first `sizes` entries of each sequence in a tensor [B ...]."""
        ragged = cls.__new__(cls)
        ragged.whole, ragged.sizes, ragged.dim = whole, sizes, dim
        return ragged

    @cached_property
    def parts(self) -> Sequence[Tensor]:
        return [self.whole[i : i + 1].narrow(self.dim, 0, size) for i, size in enumerate(self.sizes)]

    @cached_property
    def whole(self) -> Tensor:
        most, behind = max(self.sizes), 2 * (self.first.dim() - 1 - self.dim)
        return torch.cat([pad(part, (0,) * (behind + 1) + (most - part.shape[self.dim],)) for part in self.parts])

    @cached_property
    def table(self) -> Tensor:
        return torch.tensor(self._places, device=self.device)

    @cached_property
    def alignment(self) -> int:
        """Return how many bytes, 16 at most, everything in `table` is a multiple of."""
        return gcd(16, *(number for place in self._places for number in place))

    @cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        size = self.dtype.itemsize
        return [(part.data_ptr(), part.stride(1) * size, part.stride(2) * size) for part in self.parts]

    @property
    def first(self) -> Tensor:
        """Return the tensor of the first sequence."""
        return self.parts[0] if "parts" in vars(self) else self.whole[:1]

    @cached_property
    def dense(self) -> bool:
        """Say whether every sequence's tensor is contiguous."""
        return all(part.is_contiguous() for part in self.parts)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of `whole`."""
        if "whole" in vars(self):
            return tuple(self.whole.shape)
        one = list(self.first.shape)
        return (len(self.sizes.values), *one[1 : self.dim], max(self.sizes), *one[self.dim + 1 :])

    @cached_property
    def counts(self) -> Tensor:
        """Return `sizes` as [B] int64, beside the tensors."""
        return self.sizes.on(self.device)

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @cached_property
    def device(self) -> torch.device:
        return self.first.device

    @cached_property
    def mT(self) -> Ragged:
        """Return views whose last two dimensions have changed places."""
        last = self.first.dim() - 1
        swapped = {last: last - 1, last - 1: last}
        return Ragged([part.mT for part in self.parts], swapped.get(self.dim, self.dim))

    def slice(self, start: int | Each, end: int | Each) -> Ragged:
        """Return entries `start` to `end` of each sequence."""
        spans = zip(per_sequence(start, len(self.parts)), per_sequence(end, len(self.parts)), self.parts, strict=True)
        return Ragged([part.narrow(self.dim, first, last - first) for first, last, part in spans], self.dim)


def first_of(x: Tensor | Ragged) -> Tensor:
    """Return a tensor that has the dtype, the place and the strides of x, of several sequences those of the first."""
    return x.first if isinstance(x, Ragged) else x


def each(values: Sequence[int]) -> int | Each:
    """Return the number that all sequences share, or one for each of them."""
    return values[0] if len(set(values)) == 1 else Each(values)


def per_sequence(number: int | Each, count: int) -> tuple[int, ...]:
    """Return the number of each of `count` sequences."""
    return number.values if isinstance(number, Each) else (number,) * count


def filled(x: Tensor | Ragged) -> Tensor:
    """Return x [B ...] with what is behind the shorter sequences, which nobody may read."""
    return x.whole if isinstance(x, Ragged) else x


def leading(x: Tensor | Ragged, count: int | Each) -> Tensor:
    """Return the first entries [B ... count] of each sequence, which has as many: `Ragged` where the counts differ,
    which the policies' code takes for a tensor."""
    whole = filled(x)
    if isinstance(count, Each):
        return cast(Tensor, Ragged.filled_up(whole, count, whole.dim() - 1))
    return whole[..., :count]


def appended(x: Tensor | Ragged, entry: int | Each) -> Tensor:
    """Put an entry behind those of each sequence. x [B ... S] -> [B ... S + 1], filled up as `filled` is"""
    whole = filled(x)
    ones = [1] * (whole.dim() - 1)
    entries = entry.on(whole.device).view(-1, *ones) if isinstance(entry, Each) else whole.new_full([1, *ones], entry)
    entries = entries.expand(*whole.shape[:-1], 1)
    if not isinstance(x, Ragged):
        return torch.cat([whole, entries], -1)
    return pad(whole, (0, 1)).scatter(-1, x.counts.view(-1, *ones).expand_as(entries), entries)


def by_sequence(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let an operation of the plain-torch backend take `Ragged` and `Each`: it is then called for one sequence after
    the other, on the backend that is best for one. Tensors among the arguments are [B ...], or the same for all."""

    @wraps(run)
    def served(*arguments: Any) -> Any:
        if _sequences(arguments) is None:
            return run(*arguments)
        from kernels import ops  # which names this module

        op = getattr(ops, run.__name__)
        return _joined([op(*of_one) for of_one in sequence_by_sequence(arguments)])

    return served


def sequence_by_sequence(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the arguments of a call for each of unequal sequences; those of the call itself where all are equal."""
    batch = _sequences(arguments)
    if batch is None:
        return [arguments]
    return [tuple(_of(argument, i, batch) for argument in arguments) for i in range(batch)]


def _sequences(arguments: Any) -> int | None:
    """Return how many sequences unequal arguments are of, or None where there are none."""
    for argument in arguments:
        if isinstance(argument, Ragged | Each):
            return len(argument.sizes.values if isinstance(argument, Ragged) else argument.values)
        if isinstance(argument, tuple | list) and (count := _sequences(argument)) is not None:
            return count
    return None


def _of(argument: Any, i: int, batch: int) -> Any:
    """Return what belongs to sequence `i`."""
    if isinstance(argument, Ragged):
        return argument.parts[i]
    if isinstance(argument, Each):
        return argument.values[i]
    if isinstance(argument, Tensor):
        return argument[i : i + 1] if len(argument) == batch else argument
    if isinstance(argument, tuple | list):
        parts = [_of(part, i, batch) for part in argument]
        return type(argument)(*parts) if hasattr(argument, "_fields") else parts
    return argument


def _joined(results: list[Any]) -> Any:
    """Join what the sequences gave."""
    if isinstance(results[0], tuple):
        return tuple(_joined(list(same)) for same in zip(*results, strict=True))
    if results[0] is None:
        return None
    shapes = {result.shape for result in results}
    if len(shapes) == 1:
        return torch.cat(results)
    unequal = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    return Ragged(results, unequal[0])
