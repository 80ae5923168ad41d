"""Finds which channels of a head a model rotates together, and brings them into the order that
methods and kernels know.

In that order (kernels/rope.py) channel i of R rotated channels turns with channel i + R/2, and both
halves of cos and sin are alike. GLM turns neighbours together, 2i with 2i + 1: its queries and keys
are reordered on their way to a method, which changes no product of the two. Other models give one
half of cos and sin, or each number twice in a row.

A config does not say which of these a model does. It is found by calling the function with which
the model itself rotates, so that a model that does something else is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.engine.cache import UnsupportedError
from kernels.rope import halves, rotate

FUNCTION = "apply_rotary_pos_emb"  # transformers' name for it in the file of each model
COMPLEX = "apply_rotary_emb"  # and of the one that takes complex numbers (DeepSeek-V2)
LEAVING = (
    "apply_rotary_pos_emb_interleave"  # and of the one that takes neighbours and leaves halves
)
POSITIONS = (1, 7, 77)  # at which a model is asked how it rotates


class Angles(Enum):
    """Name the forms in which models give the cos and sin of R channels."""

    TWICE = "R numbers, of which the second half repeats the first"
    ONCE = "R/2 numbers"
    IN_A_ROW = "R numbers, each twice in a row"

    def as_halves(self, x: Tensor) -> Tensor:
        """Return cos or sin [... R or R/2], given in this form, as R numbers whose halves are
        alike."""
        if self is Angles.TWICE:
            return x
        once = x if self is Angles.ONCE else x[..., ::2]
        return torch.cat([once, once], -1)


class Pairing(NamedTuple):
    """Describe how a model rotates heads: the first `width` channels, either neighbours together or
    the two halves."""

    width: int
    neighbours: bool = False
    angles: Angles = Angles.TWICE

    def in_halves(self, x: Tensor) -> Tensor:
        """Return queries or keys [... D] of the model with their channels in the order of
        kernels/rope.py."""
        return halves(x, self.width) if self.neighbours else x


def pairing_of(
    attention: nn.Module, rotary: Callable[[Tensor], tuple[Tensor, Tensor]], head_dim: int
) -> Pairing:
    """Return how the module `attention` rotates heads of `head_dim` channels. `rotary` maps
    positions [P] to the cos and sin that the model computes for them, [1 P R or R/2]. Raises
    `UnsupportedError` if the rotation is none that methods could undo."""
    cos, sin = (part.float().cpu() for part in rotary(torch.tensor(POSITIONS)))
    x = torch.randn(1, 1, len(POSITIONS), head_dim, generator=torch.Generator().manual_seed(0))
    turned = _turned(attention, x, cos, sin)
    count = cos.shape[-1]
    forms = ((count, Angles.TWICE), (count, Angles.IN_A_ROW), (2 * count, Angles.ONCE))
    for neighbours, (width, angles) in product((False, True), forms):
        pairing = Pairing(width, neighbours, angles)
        if turned is not None and pairing.width <= head_dim:
            ours = rotate(pairing.in_halves(x), *map(pairing.angles.as_halves, (cos, sin)))
            if torch.allclose(ours, pairing.in_halves(turned), rtol=1e-4, atol=1e-5):
                return pairing
    raise UnsupportedError(
        f"{type(attention).__name__} does not rotate pairs of channels as any model known here does, and methods "
        "rotate its keys back and forth: choose another model."
    )


def _turned(attention: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """Return x [1 1 P D] as the file that defines `attention` rotates queries, or None if it has no
    function for that. A model that hands this function only the channels that turn gets those, and
    one whose function takes either queries or keys (Gemma 4) gets one of them."""
    files = (sys.modules.get(kind.__module__) for kind in type(attention).__mro__)
    named = [vars(file) for file in files if file is not None]
    turn: Any = next((names[COMPLEX] for names in named if COMPLEX in names), None)
    if turn is not None and x.shape[-1] == 2 * cos.shape[-1]:
        return turn(x, x, torch.complex(cos, sin))[0]
    apply: Any = next((names[FUNCTION] for names in named if FUNCTION in names), None)
    leaving: Any = next((names[LEAVING] for names in named if LEAVING in names), None)
    if apply is None and leaving is not None:  # GLM-5 has it alone
        x = x.unflatten(-1, (2, -1)).mT.flatten(-2)
        apply = leaving
    if apply is None:
        return None
    for width, both in product((x.shape[-1], cos.shape[-1]), (True, False)):
        turns = x[..., :width]
        try:
            turned = apply(turns, turns, cos, sin)[0] if both else apply(turns, cos, sin)
            return torch.cat([turned, x[..., width:]], -1)
        except (RuntimeError, TypeError):
            # cos does not fit so many channels, or the function takes other arguments
            continue
    return None
