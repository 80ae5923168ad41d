"""Rotates keys and queries by position, in the half-split layout of transformers: of the first R of D
channels, which are rotated, channel i is rotated with channel i + R/2."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.ragged import by_sequence
from kernels.step_inputs import to_device

MOST_TABLE_BYTES = 64 << 20  # of a table of cos and sin; a longer one is not made


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B G T D] by cos and sin [1|B T R] with R <= D: only the first R channels are
    rotated."""
    width = cos.shape[-1]
    turning, still = x[..., :width], x[..., width:]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = turning.chunk(2, -1)
    return torch.cat([turning * cos + torch.cat([-second, first], -1) * sin, still], -1)


def halves(x: Tensor, width: int) -> Tensor:
    """Bring the first `width` channels of x [... D], of which a model rotates neighbours together
    (2i with 2i + 1), into the order in which `rotate` takes them."""
    turning = x[..., :width].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat([turning, x[..., width:]], -1)


@by_sequence
def rotate_to(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate x [B G T D], all of whose rows stand at one position `at` ([1] for all sequences, or
    [B], int64), by that row of the tables cos and sin [1 C R]. It is computed in fp32 and returned
    in `dtype`."""
    turns = (part[0][at].float().unsqueeze(1) for part in (cos, sin))
    return rotate(x.float(), *turns).to(dtype)


def unrotate(
    x: Tensor, cos: Tensor, sin: Tensor, by: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
) -> Tensor:
    """Undo `rotate`, with `by`, a function that rotates as it does. It divides by cos^2 + sin^2,
    which is not one if RoPE scaling (YaRN) stretches both."""
    norm = cos.square() + sin.square()
    return by(x, cos / norm, -sin / norm)


def table_bytes(positions: int, width: int, entry_bytes: int) -> int:
    """Return the bytes of a table of cos and sin of `positions` positions for heads that rotate
    `width` channels; 0 if they are more than `MOST_TABLE_BYTES`, so that none is made."""
    nbytes = 2 * positions * width * entry_bytes
    return nbytes if nbytes <= MOST_TABLE_BYTES else 0


def rotate_by(
    x: Tensor, distance: int, rope: Callable[[Tensor], tuple[Tensor, Tensor]], text: int = 0
) -> Tensor:
    """Rotate already rotated keys x [B G T D] further by `distance` positions; `rope` maps
    positions [P] to cos, sin. `text`: how many tokens long the text was whose length set their
    angles, if angles depend on it (dynamic NTK, LongRoPE), else 0.

    This is a pure rotation: the stretch that RoPE scaling puts into cos and sin is in the rows
    already."""
    last = max(distance, text - 1)  # `rope` takes the last position for the end of the text
    cos, sin = (part[:, :1] for part in rope(to_device([distance, last], x.device)))
    stretch = (cos.float().square() + sin.float().square()).sqrt()
    return rotate(x.float(), cos.float() / stretch, sin.float() / stretch).to(x.dtype)
