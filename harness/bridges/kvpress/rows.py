"""Finds out which rows a press has kept, by looking for them among those it was given."""

from __future__ import annotations

import torch
from torch import Tensor

from methods.base.pieces import pieces

Rows = tuple[Tensor, Tensor]  # keys and values, each [B G S D]
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers by size, to see the bits of numbers


def places_of(given: Rows, kept: Rows) -> Tensor | None:
    """Return where the rows of `kept` stand in `given`, int64 [B G K], or None if one of them is
    not there bit for bit.

    Rows that are equal bit for bit are distinguished by their order.
    """
    hashes, source = _hashes(given).sort(dim=-1, stable=True)
    wanted, order = _hashes(kept).sort(dim=-1, stable=True)
    repeats = torch.arange(wanted.shape[-1], device=wanted.device) - torch.searchsorted(wanted, wanted)
    found = (torch.searchsorted(hashes, wanted) + repeats).clamp(max=hashes.shape[-1] - 1)
    places = torch.empty_like(order).scatter_(-1, order, source.gather(-1, found))
    return places if all(_equal_at(x, places, y) for x, y in zip(given, kept, strict=True)) else None


def _hashes(rows: Rows) -> Tensor:
    """Return a number for every row that depends on all its bits, int64 [B G S]."""
    factors = torch.randint(2**62, (2, rows[0].shape[-1]), generator=torch.Generator().manual_seed(0))
    both = list(zip(map(_bits, rows), factors.to(rows[0].device), strict=True))

    def of(part: slice) -> Tensor:
        keys, values = ((bits[:, :, part].long() * factor).sum(-1) for bits, factor in both)
        return keys + values

    return torch.cat([of(part) for part in pieces(rows[0].shape[2])], -1)


def _equal_at(x: Tensor, places: Tensor, wanted: Tensor) -> bool:
    across = places.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])
    return torch.equal(_bits(x).gather(2, across), _bits(wanted))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(WORDS[x.element_size()])
