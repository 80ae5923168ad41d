"""Defines in plain torch the products of queries and keys with the basis of InfiniGen's partial keys
(arXiv 2406.19707): few columns stand for all channels of a key."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels import ops
from kernels.ragged import Ragged

BESIDE = 16  # of an index that lies channel by channel, the number of rows is a multiple of it


class Guess(NamedTuple):
    """Hold queries that are to be rotated and multiplied with a basis and with `scale`."""

    q: Tensor  # [B H 1 D], not rotated yet
    cos: Tensor  # [1|B 1 R]
    sin: Tensor
    basis: Tensor  # [B G D W]
    scale: float


class NewPartial(NamedTuple):
    """Hold one new key of each sequence that is to be multiplied with a basis and written to row
    `at` of an index."""

    k: Tensor  # [B G 1 D]
    basis: Tensor  # [B G D W]
    rows: Tensor | Ragged  # [B G S W], in memory row by row or channel by channel
    at: Tensor  # [1] for all sequences, or [B], int64


def partial_products(guess: Guess | None, new: NewPartial | None) -> Tensor | None:
    """Rotate the queries of `guess` and reduce them to the columns of its basis; return them,
    [B G g W], or None without a guess. Reduce the key of `new` to the columns of its own basis and
    write it to its row, in place.

    The rows of a sequence may have fewer columns than its basis, whose last columns are then
    zero."""
    if new is not None:
        narrow = new.k @ new.basis
        if isinstance(new.rows, Ragged):
            ops.put_rows(new.rows, new.at.view(-1, 1, 1).expand(*narrow.shape[:3]), narrow)
        else:
            new.rows.index_copy_(2, new.at, narrow)
    return None if guess is None else narrowed(ops.rotate(*guess[:3]), guess.basis, guess.scale)


def narrowed(q: Tensor, basis: Tensor, scale: float) -> Tensor:
    """Return rotated queries q [B H 1 D] in the columns of a basis [B G D W], times `scale`:
    [B G g W]."""
    grouped = q.view(len(q), basis.shape[1], -1, q.shape[3]).float()
    return (grouped @ basis.float() * scale).to(q.dtype)
