"""Combines tensors of several sequences that differ in one size, so that one launch serves all of
them.

Each sequence keeps its memory, and kernels read from a table where it begins. A page table
(PagedAttention, arXiv 2309.06180) does the same for pages of one length; with one page per sequence
its rows are consecutive, so reading them takes no further step, and nothing is copied when a
sequence joins or leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, wraps
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.per_sequence import CountedOnDevice, PerSequence, values_per_sequence
from kernels.step_inputs import note_memory_read, record_input, to_device

RAGGED = "takes sequences of one length"  # why a backend refuses unequal ones


class Ragged:
    """Hold one tensor [1 ...] of every sequence in a batch; they differ only in the length of
    dimension `dim`.

    `parts` are these tensors, `sizes` their lengths, and `table` [B 3] (int64) their addresses and
    the bytes from one entry of the second and of the third dimension to the next. `whole` [B ...]
    is one padded tensor of all; entries after the shorter ones must not be read."""

    def __init__(
        self,
        parts: Sequence[Tensor],
        dim: int = 2,
        dead: int | None = None,
        reader: torch.device | None = None,
    ) -> None:
        """Combine tensors [1 ...], which must stay where they are as long as this object lives. The
        last `dead` ones belong to no sequence: they fill a batch up to a fixed size, and what is
        written there is lost (free slots, see `PerSequence`). `reader`: the device whose kernels
        read them, if it is not their own, as for pinned host memory."""
        self.parts, self.dim = parts, dim
        self.device = parts[0].device if reader is None else reader
        self.sizes = PerSequence(
            [part.shape[dim] for part in parts[: len(parts) - (dead or 0)]], dead
        )

    @classmethod
    def filled_up(cls, whole: Tensor, sizes: PerSequence, dim: int = 2) -> Ragged:
        """Make a `Ragged` (tensors that differ in length between sequences) of a padded tensor
        [B ...] of which each sequence has the first `sizes` entries in dimension `dim`."""
        ragged = cls.__new__(cls)
        ragged.whole, ragged.sizes, ragged.dim, ragged.device = whole, sizes, dim, whole.device
        return ragged

    @cached_property
    def parts(self) -> Sequence[Tensor]:
        return [
            self.whole[i : i + 1].narrow(self.dim, 0, size) for i, size in enumerate(self.sizes)
        ]

    @cached_property
    def whole(self) -> Tensor:
        note_memory_read()
        most, behind = self.sizes.most, 2 * (self.first.dim() - 1 - self.dim)
        return torch.cat(
            [pad(part, (0,) * (behind + 1) + (most - part.shape[self.dim],)) for part in self.parts]
        )

    @property
    def table(self) -> Tensor:
        return record_input(self._kind, self._table)

    @cached_property
    def _table(self) -> Tensor:
        return to_device(self._places, self.device)

    @cached_property
    def _kind(self) -> Hashable:
        """Return the properties that a kernel assumes besides the table of addresses; a captured
        step can serve only sequences that share them."""
        return (
            self.dtype,
            self.dim,
            self.sizes.most,
            self.first.stride(-1),
            self.alignment,
            self.dense,
        )

    @cached_property
    def alignment(self) -> int:
        """Return a number of bytes, at most 16, of which all addresses and steps in `table` are
        multiples, so that kernels may load so many bytes at once.

        In a batch with a fixed number of slots (`sizes.dead` is not None) it is 16 if all sequences
        allow it, else the size of one number."""
        bytes_ = gcd(16, *(number for place in self._places for number in place))
        return bytes_ if self.sizes.dead is None or bytes_ == 16 else self.dtype.itemsize

    @cached_property
    def row_alignment(self) -> int:
        """Return a number of bytes, at most 16, of which the addresses and the steps of the second
        dimension are multiples; unlike `alignment`, for tensors whose rows are in that
        dimension."""
        return gcd(16, *(number for place in self._places for number in place[:2]))

    @cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        size = self.dtype.itemsize
        return [
            (part.data_ptr(), part.stride(1) * size, part.stride(2) * size) for part in self.parts
        ]

    @property
    def first(self) -> Tensor:
        """Return the tensor of the first sequence."""
        return self.parts[0] if "parts" in vars(self) else self.whole[:1]

    def stride(self, dim: int) -> int:
        return self.first.stride(dim)

    @cached_property
    def dense(self) -> bool:
        """Return whether every sequence's tensor is contiguous."""
        return all(part.is_contiguous() for part in self.parts)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of `whole`, the padded tensor of all sequences."""
        if "whole" in vars(self):
            return tuple(self.whole.shape)
        first_shape = list(self.first.shape)
        return (
            len(self.sizes),
            *first_shape[1 : self.dim],
            self.sizes.most,
            *first_shape[self.dim + 1 :],
        )

    @property
    def counts(self) -> Tensor:
        """Return the sequences' lengths as [B] int64, on the device that reads them."""
        return self.sizes.on(self.device)

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @cached_property
    def mT(self) -> Ragged:
        """Return a `Ragged` of views with the last two dimensions swapped."""
        last = self.first.dim() - 1
        swapped = {last: last - 1, last - 1: last}
        parts = [part.mT for part in self.parts]
        return Ragged(parts, swapped.get(self.dim, self.dim), self.sizes.dead, self.device)

    def slice(self, start: int | PerSequence, end: int | PerSequence) -> Ragged:
        """Return a view of entries `start` to `end` of each sequence in dimension `dim`; free slots
        get no entries."""
        live = len(self.parts) - (self.sizes.dead or 0)
        firsts, lasts = (
            values_per_sequence(number, len(self.parts))[:live] for number in (start, end)
        )
        spans = zip(self.parts[:live], firsts, lasts, strict=True)
        parts = [part.narrow(self.dim, first, last - first) for part, first, last in spans]
        parts += [part.narrow(self.dim, 0, 0) for part in self.parts[live:]]
        return Ragged(parts, self.dim, self.sizes.dead, self.device)


def with_free_slots(
    parts: Sequence[Tensor],
    dim: int = 2,
    dead: int | None = None,
    wider: int = 0,
    reader: torch.device | None = None,
) -> Ragged:
    """Combine the tensors [1 ...] of several sequences, followed by `dead` free slots, which fill a
    batch up to a fixed size: each gets memory of one entry that may be overwritten, and of `wider`
    more where rows may be written wider than they are. `reader`: as in `Ragged`; free slots lie
    there. If sequences differ in the last dimension, rows of free slots are far enough apart for
    any alignment."""
    wider = max(wider, 15) if dim == parts[0].dim() - 1 else wider
    shape = [*parts[0].shape[:dim], 1 + wider, *parts[0].shape[dim + 1 :]]
    free = (parts[0].new_zeros(shape, device=reader).narrow(dim, 0, 1) for _ in range(dead or 0))
    return Ragged([*parts, *free], dim, dead, reader)


def first_of(x: Tensor | Ragged) -> Tensor:
    """Return a tensor with the dtype, device and strides of x: x itself, or the first sequence's
    tensor of a `Ragged`."""
    return x.first if isinstance(x, Ragged) else x


def table_of(x: Tensor | Ragged) -> Tensor | None:
    """Return where the tensors of several sequences lie (`Ragged.table`), or None if x is one
    tensor."""
    return x.table if isinstance(x, Ragged) else None


def counts_of(x: Tensor | Ragged | int | PerSequence, device: torch.device) -> Tensor | None:
    """Return the lengths of unequal sequences, or a number for each, as [B] int64 on `device`; None
    if x is one tensor, or one number."""
    sizes = x.sizes if isinstance(x, Ragged) else x
    return sizes.on(device) if isinstance(sizes, PerSequence) else None


def parts_of(
    x: Tensor | Ragged, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what `first_of`, `table_of` and `counts_of` give for x."""
    return (x.first, x.table, x.sizes.on(device)) if isinstance(x, Ragged) else (x, None, None)


def filled(x: Tensor | Ragged) -> Tensor:
    """Return x as one tensor [B ...], padded where sequences are shorter; the padding must not be
    read."""
    return x.whole if isinstance(x, Ragged) else x


def with_sizes(whole: Tensor, of: object, dim: int = 2) -> Tensor | Ragged:
    """Return the result `whole` [B ...] with a length for each sequence in dimension `dim`, if the
    argument `of` has such lengths (`Ragged`, `PerSequence`): then as a `Ragged`. Otherwise return
    `whole` itself."""
    sizes = of.sizes if isinstance(of, Ragged) else of
    return Ragged.filled_up(whole, sizes, dim) if isinstance(sizes, PerSequence) else whole


def leading(x: Tensor | Ragged, count: int | PerSequence) -> Tensor:
    """Return the first `count` entries of each sequence's rows x [B ... S], as [B ... count], or as
    `Ragged` (a tensor per sequence) if the counts differ. The declared type is Tensor because the
    policies' code treats both alike."""
    whole = filled(x)
    if isinstance(count, PerSequence):
        return cast(Tensor, Ragged.filled_up(whole, count, whole.dim() - 1))
    return whole[..., :count]


def spanned(x: Tensor | Ragged, start: int, end: int | PerSequence) -> Tensor:
    """Return the entries `start` to `end` of each sequence's rows x [B ... S], as `Ragged` (a
    tensor per sequence) if the ends differ."""
    return leading(filled(x)[..., start:], end - start)


def too_few(x: Tensor | Ragged, count: int | PerSequence, dim: int = -1) -> bool:
    """Return whether some sequence of x has fewer than `count` entries in dimension `dim`, in which
    the parts of a `Ragged` differ. Return False if only the device knows the count."""
    if isinstance(count, CountedOnDevice):
        return False
    left = (x.sizes if isinstance(x, Ragged) else x.shape[dim]) - count
    return (left if isinstance(left, int) else min(left.values)) < 0


def appended(x: Tensor | Ragged, entry: int | PerSequence) -> Tensor:
    """Append `entry`, one number for all or one per sequence, to the end of each sequence's rows. x
    [B ... S] -> [B ... S + 1], padded where sequences are shorter"""
    whole = filled(x)
    if isinstance(entry, int) and not isinstance(x, Ragged):
        return pad(whole, (0, 1), value=entry)
    ones = [1] * (whole.dim() - 1)
    entries = (
        entry.on(whole.device).view(-1, *ones)
        if isinstance(entry, PerSequence)
        else whole.new_full([1, *ones], entry)
    )
    entries = entries.expand(*whole.shape[:-1], 1)
    if not isinstance(x, Ragged):
        return torch.cat([whole, entries], -1)
    return pad(whole, (0, 1)).scatter(-1, x.counts.view(-1, *ones).expand_as(entries), entries)


def by_sequence(run: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an operation of the plain-torch backend so that it also takes arguments that differ
    between sequences, `Ragged` (a tensor for each) and `PerSequence` (a whole number for each): it
    is then called for one sequence after the other, on the best backend for one sequence, and the
    results are joined. Tensors among the arguments are [B ...], or the same for all."""

    @wraps(run)
    def served(*arguments: Any) -> Any:
        if not (numbers := _numbers(arguments)):
            return run(*arguments)
        from kernels import ops  # which names this module

        note_memory_read()
        op = getattr(ops, run.__name__)
        return _joined([op(*own) for own in sequence_by_sequence(arguments)], numbers)

    return served


def sequence_by_sequence(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Split the arguments of a call for several unequal sequences into those of one call per
    sequence, without free slots. If no argument differs between sequences (`Ragged` or
    `PerSequence`), return the arguments of the call itself."""
    if not (numbers := _numbers(arguments)):
        return [arguments]
    batch = len(numbers[0])
    live = batch - max(number.dead or 0 for number in numbers)
    return [tuple(_of(argument, i, batch) for argument in arguments) for i in range(live)]


def _of(argument: Any, i: int, batch: int) -> Any:
    """Return the part of `argument` that belongs to sequence `i` of `batch`; lists are searched,
    and what is the same for all sequences is returned as it is."""
    if isinstance(argument, Ragged):
        return argument.parts[i]
    if isinstance(argument, PerSequence):
        return argument.values[i]
    if isinstance(argument, Tensor):
        return argument[i : i + 1] if len(argument) == batch else argument
    if isinstance(argument, tuple | list):
        parts = [_of(part, i, batch) for part in argument]
        return type(argument)(*parts) if hasattr(argument, "_fields") else parts
    return argument


def _numbers(arguments: Any) -> list[PerSequence]:
    """Return the `PerSequence` (a whole number for each sequence) among the arguments, including
    the lengths of the tensors of each `Ragged`."""
    numbers: list[PerSequence] = []
    for argument in arguments:
        if isinstance(argument, Ragged | PerSequence):
            numbers.append(argument.sizes if isinstance(argument, Ragged) else argument)
        elif isinstance(argument, tuple | list):
            numbers += _numbers(argument)
    return numbers


def _joined(results: list[Any], numbers: Sequence[PerSequence]) -> Any:
    """Join the sequences' results into one: a tensor if their shapes are equal, else a `Ragged`;
    tuples are joined item by item. Free slots get zeros. Sizes that equal one of `numbers`, which
    came with the arguments, become the same object, which may be on the device already."""
    if isinstance(results[0], tuple):
        return tuple(_joined(list(same), numbers) for same in zip(*results, strict=True))
    if results[0] is None:
        return None
    dead = next((number.dead for number in numbers if number.dead is not None), None)
    joined = [*results, *[torch.zeros_like(results[0])] * (dead or 0)]
    shapes = {result.shape for result in results}
    if len(shapes) == 1:
        return torch.cat(joined)
    unequal = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    ragged = Ragged(joined, unequal[0], dead)
    ragged.sizes = next((number for number in numbers if number == ragged.sizes), ragged.sizes)
    return ragged
