"""Checks what the policies of a method return, while its first example runs (`Checks` in
methods/base/state.py).

Nothing else would notice a row that is named twice, or one that no token has: the rows of all heads
lie one after the other, so a number that is out of range for one head is a token of the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class ReturnedError(ValueError):
    """Report that a policy returned what its contract rules out: which policy, in which layer, and
    what it returned."""


@dataclass(frozen=True, kw_only=True)
class RowNumbers:
    """Describe the wanted rows: int64 [B heads K], for every head different numbers from 0 to below
    `tokens`; None: any numbers. `heads`: how many heads there may be. `count`: K; None for any.
    `gaps`: -1 stands where a head has fewer. `alone`: the rows are of a single head, [K]."""

    batch: int
    heads: Sequence[int]
    tokens: int | None
    device: torch.device
    count: int | None = None
    ascending: bool = False
    gaps: bool = False
    alone: bool = False

    def check(self, given: object, whose: str) -> None:
        """Raise `ReturnedError` if `given` does not fit. `whose`: who returned it, in words."""
        fault = self._misfit(given)
        if fault is None and self.tokens is not None:
            assert isinstance(given, Tensor)
            fault = self._wrong_number(given.view(1, 1, -1) if self.alone else given, self.tokens)
        if fault is not None:
            raise ReturnedError(f"{whose} {fault}. Wanted are {self}.")

    def __str__(self) -> str:
        count = "K" if self.count is None else self.count
        shapes = [f"[{self.batch}, {heads}, {count}]" for heads in dict.fromkeys(self.heads)]
        shape = f"[{count}]" if self.alone else " or ".join(shapes)
        numbers = "numbers" if self.tokens is None else f"different numbers from 0 to {self.tokens - 1}"
        each, gaps, order = (
            " for each head" * (not self.alone),
            ", -1 for none" * self.gaps,
            ", ascending" * self.ascending,
        )
        return f"{numbers}{each}{gaps}{order}, as int64 {shape} on {self.device}"

    def _misfit(self, given: object) -> str | None:
        """Return what is wrong without looking at the numbers, or None."""
        if not isinstance(given, Tensor):
            return f"a {type(given).__name__}"
        if given.dtype != torch.int64:
            return f"a tensor of {str(given.dtype).removeprefix('torch.')}"
        if given.device != self.device:
            return f"a tensor on {given.device}"
        shape = list(given.shape)
        fits = (
            len(shape) == 1 if self.alone else shape[:1] == [self.batch] and len(shape) == 3 and shape[1] in self.heads
        )
        return None if fits and shape[-1] == (self.count or shape[-1]) else f"a tensor of shape {shape}"

    def _wrong_number(self, given: Tensor, tokens: int) -> str | None:
        outside = (given >= tokens) | (given < (-1 if self.gaps else 0))
        if (at := _first(outside)) is not None:
            return f"{int(given[at])}{self._of(at)}"
        ordered = given if self.ascending else given.sort(-1).values
        before, behind = ordered[..., :-1], ordered[..., 1:]
        if (at := _first((before == behind) & (before >= 0))) is not None:
            return f"{int(before[at])} twice{self._of(at)}"
        if self.ascending and (at := _first(before > behind)) is not None:
            return f"{int(before[at])} before {int(behind[at])}{self._of(at)}"
        return None

    def _of(self, at: tuple[int, ...]) -> str:
        return "" if self.alone else f" for head {at[1]} of sequence {at[0]}"


def _first(where: Tensor) -> tuple[int, ...] | None:
    """Return the place of the first True in [B heads K]; None if there is none."""
    return tuple(where.nonzero()[0].tolist()) if where.any() else None
