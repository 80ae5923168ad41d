"""Holds rows of several sequences that step together, each in the host memory of its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import ops
from kernels.ragged import Ragged, filled, with_free_slots
from methods.tiers.traffic import Traffic


class BatchedHostRows:
    """Read rows [B G C W] in place, as `HostRows` do. What moves is counted for each sequence by
    itself."""

    def __init__(self, rooms: Sequence[Tensor], device: torch.device, dim: int = 2, dead: int | None = None) -> None:
        """rooms [1 G C W]: one per sequence. They differ in dimension `dim`; `device` reads them,
        and `dead` slots are free (kernels/ragged.py)."""
        self.rows = with_free_slots(rooms, dim, dead, reader=device)

    def gather(
        self, rows: Tensor | Ragged, traffic: Traffic, slots: Tensor | None = None, held: Tensor | None = None
    ) -> Tensor:
        """Return chosen rows on the device, as `HostRows.gather` does, rows [B G K] -> [B G K W].
        After the rows of a sequence that has fewer, values are arbitrary. With `slots`, all have
        equally many; a missing row must have a slot."""
        row_bytes, chosen = self.rows.shape[3] * self.rows.dtype.itemsize, filled(rows)
        if slots is not None and held is None:
            nothing = (*chosen.shape[:2], 1, self.rows.shape[3])
            held, slots = torch.zeros(nothing, dtype=self.rows.dtype, device=chosen.device), slots.clamp(max=0)
        moved: Tensor | Ragged = ops.gather_tiers(self.rows, rows if slots is None else chosen, held, slots)
        if slots is not None:
            count = (slots < 0).sum((1, 2))
        elif isinstance(rows, Ragged):
            count = rows.counts * chosen.shape[1]
        else:
            count = torch.full((len(chosen),), chosen[0].numel(), device=chosen.device)
        traffic.tally("to_device_bytes", count * row_bytes)
        whole, lacking = filled(moved), chosen.shape[2] - filled(moved).shape[2]
        return pad(whole, (0, 0, 0, lacking)) if lacking else whole  # plain torch returns only existing rows

    def in_place(self, count: int, traffic: Traffic) -> Tensor:
        """Return all rows, of which an operation reads `count` per head in place, and count
        these."""
        entry_bytes = count * self.rows.shape[1] * self.rows.dtype.itemsize
        traffic.tally("to_device_bytes", self.rows.counts * entry_bytes)
        return cast(Tensor, self.rows)
