"""Keys without the rotation of their positions, and with that of others (CachedAttention, ATC 2024, section 3.4).

A history that has lost its oldest tokens, or those that a method evicted, goes on at positions 0 to H-1. Angles come
from the model's own rotary module (`LayerSpec.rope`), so scaled, partial and per-layer rotations are the model's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import rope

Angles = Callable[[Tensor], tuple[Tensor, Tensor]]  # positions [P] -> cos, sin, each [1 P R]


class RotationError(ValueError):
    """These keys' rotations do not follow from their positions alone."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Of one layer. `dtype`: the model's, to which it rounds cos and sin; all arithmetic is in fp32.

    Keys are [..., T, D]; positions are [T], or [..., T] where heads keep different tokens (-1 for a row that is
    none, which stays as it is).

    Dynamic and LongRoPE scaling turn every token of a forward by how far that forward reaches: as far as the last of
    `positions`.
    """

    angles: Angles
    dtype: torch.dtype

    def off(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys as before their rotation. -> fp32, for a rounding here would be one more"""
        return self._turned(rope.unrotate, keys, positions)

    def on(self, rows: Tensor, positions: Tensor) -> Tensor:
        """What `off` gave, rotated to `positions`. -> the model's dtype"""
        return self._turned(rope.rotate, rows, positions).to(self.dtype)

    def move(self, keys: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Keys rotated to `source`, as they are at `target`. -> the model's dtype"""
        return self.on(self.off(keys, source), target)

    def steady(self, tokens: int) -> int:
        """Up to how many tokens, `tokens` at most, a text may grow without a change of the angles at its start."""
        if self._alike(tokens):
            return tokens
        return 1 + bisect_left(range(2, tokens), True, key=lambda reach: not self._alike(reach))

    def check(self, tokens: int) -> None:
        """Raises `RotationError` where the keys of a text of `tokens` tokens depend on the forwards it came in."""
        if (steady := self.steady(tokens)) < tokens:
            raise RotationError(
                f"This model's rotary scaling (dynamic or LongRoPE) changes all angles once a text exceeds {steady} "
                "tokens, so what is cut from a longer history does not fit the shorter text: set overflow.by="
                "truncate_tokens, which computes that text anew, or an overflow.window of at most that many tokens."
            )

    def fixed(self, positions: Tensor, text: int = 0) -> Rotation:
        """For these consecutive positions alone, in a text of `text` tokens, or one that ends with them. It asks the
        model no more, so another thread may use it."""
        last = positions.new_tensor([max(text - 1, int(positions[-1]) if len(positions) else 0)])
        asked = self.angles(torch.cat([positions, last]))
        cos, sin = (part[:, :-1].to(positions.device) for part in asked)
        return Rotation(lambda asked: (cos[:, asked - positions[0]], sin[:, asked - positions[0]]), self.dtype)

    def _turned(self, way: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor, positions: Tensor) -> Tensor:
        if not rows.shape[-2]:
            return rows.float()
        cos, sin = self._at(positions.flatten().clamp(min=0))
        if positions.dim() == 1:
            cos, sin = (part.to(rows.device).unsqueeze(0) for part in (cos, sin))
            return way(rows.float().reshape(rows.shape[:-2].numel(), 1, *rows.shape[-2:]), cos, sin).view(rows.shape)
        flat = rows.float().reshape(rows.shape[:-2].numel(), 1, *rows.shape[-2:])  # every head as a sequence of its own
        cos, sin = (part.to(rows.device).view(flat.shape[0], flat.shape[2], -1) for part in (cos, sin))
        turned = way(flat, cos, sin).view(rows.shape)
        return torch.where((positions < 0).unsqueeze(-1).to(rows.device), rows.float(), turned)

    def _at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [P R] fp32, with the model's roundings."""
        cos, sin = (part[0].to(self.dtype).float() for part in self.angles(positions))
        return cos, sin

    def _alike(self, reach: int) -> bool:
        """Whether position 1 has the angles it has in the shortest text."""
        ends = (torch.tensor([1]), torch.tensor([1, max(1, reach - 1)]))
        short, long = (self.angles(end)[0][0, 0] for end in ends)
        return torch.equal(short, long)
