"""Numbers and tensors of several sequences: `PerSequence` and `Ragged`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.per_sequence import PerSequence, per_sequence, values_per_sequence
from kernels.ragged import Ragged

SIZES = (5, 70, 33, 64, 18)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ragged(*shape: int, dim: int = 2, sizes: Sequence[int] = SIZES) -> Ragged:
    """Of sequences with `shape` [1 ...], which have `sizes` in dimension `dim`."""
    return Ragged([rows(*shape[:dim], size, *shape[dim + 1 :], seed=i) for i, size in enumerate(sizes)], dim)


def test_numbers_of_several_sequences_add_and_subtract() -> None:
    lengths = PerSequence([4, 9, 6])
    assert lengths + 2 == PerSequence([6, 11, 8])
    assert lengths + PerSequence([1, 0, 3]) == PerSequence([5, 9, 9])
    assert lengths - 4 == PerSequence([0, 5, 2])
    assert lengths - PerSequence([4, 1, 1]) == PerSequence([0, 8, 5])
    assert 10 - lengths == PerSequence([6, 1, 4])


def test_one_number_stands_for_equal_ones() -> None:
    assert per_sequence([7, 7]) == 7
    assert per_sequence([7, 8]) == PerSequence([7, 8])
    assert values_per_sequence(7, 2) == (7, 7)
    assert values_per_sequence(PerSequence([7, 8]), 2) == (7, 8)


@pytest.mark.parametrize(("shape", "dim"), [((1, 2, 0, 16), 2), ((1, 2, 16, 0), 3), ((1, 2, 3, 0, 4), 3)])
def test_the_whole_has_every_sequence_at_its_beginning(shape: tuple[int, ...], dim: int) -> None:
    x = ragged(*shape, dim=dim)
    assert x.whole.shape == x.shape
    for i, (part, size) in enumerate(zip(x.parts, SIZES, strict=True)):
        assert torch.equal(x.whole[i : i + 1].narrow(dim, 0, size), part)


def test_what_is_filled_up_names_the_beginning_of_every_sequence() -> None:
    whole = rows(3, 2, 8, 4)
    x = Ragged.filled_up(whole, PerSequence([8, 3, 5]))
    assert x.whole is whole
    assert (x.shape, x.dtype, x.first.shape) == ((3, 2, 8, 4), torch.float32, (1, 2, 8, 4))
    assert [part.data_ptr() for part in x.parts] == [one.data_ptr() for one in whole]
    assert [part.shape for part in x.parts] == [(1, 2, size, 4) for size in (8, 3, 5)]


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (1, 5),
        (0, PerSequence(SIZES)),
        (PerSequence([0, 9, 1, 60, 2]), PerSequence(SIZES)),
        (PerSequence([2, 1, 0, 3, 4]), 5),
    ],
)
def test_a_slice_is_a_view_of_every_sequence(start: int | PerSequence, end: int | PerSequence) -> None:
    keys = ragged(1, 2, 0, 16)
    cut = keys.slice(start, end)
    spans = zip(values_per_sequence(start, 5), values_per_sequence(end, 5), strict=True)
    for part, whole, (first, last) in zip(cut.parts, keys.parts, spans, strict=True):
        assert torch.equal(part, whole[:, :, first:last])
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize(("dim", "turned"), [(1, 1), (2, 3), (3, 2)])
def test_turning_goes_with_the_dimension_that_differs(dim: int, turned: int) -> None:
    x = ragged(1, 2, 3, 4, dim=dim)
    assert x.mT.dim == turned
    assert all(torch.equal(one, part.mT) for one, part in zip(x.mT.parts, x.parts, strict=True))
