"""Rotary embedding: inverses and further turns, also where RoPE scaling stretches cos and sin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels.rope import rotate, rotate_by, unrotate


def angles(positions: Tensor, width: int, stretch: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos, sin [1 P R] as transformers makes them."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = positions.double()[:, None] * frequencies
    both = torch.cat([turns, turns], -1).unsqueeze(0)
    return (both.cos() * stretch).float(), (both.sin() * stretch).float()


@pytest.mark.parametrize("stretch", [1.0, 1.35])
@pytest.mark.parametrize("width", [32, 24])
def test_unrotate_is_the_inverse(stretch: float, width: int) -> None:
    x, (cos, sin) = torch.randn(2, 3, 7, 32), angles(torch.arange(90, 97), width, stretch)
    assert_close(unrotate(rotate(x, cos, sin), cos, sin), x)


def test_channels_turn_in_halves() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    quarter = torch.zeros(1, 1, 4), torch.ones(1, 1, 4)  # 90 degrees: (a, b) -> (-b, a) for channels (0, 2) and (1, 3)
    assert rotate(x, *quarter).flatten().tolist() == [-3.0, -4.0, 1.0, 2.0]


@pytest.mark.parametrize("stretch", [1.0, 1.35])
def test_rotate_by_adds_a_distance(stretch: float) -> None:
    x, positions = torch.randn(1, 2, 5, 16), torch.arange(40, 45)

    def rope(positions: Tensor) -> tuple[Tensor, Tensor]:
        return angles(positions, 16, stretch)

    turned = rotate_by(rotate(x, *rope(positions)), 1000, rope)
    assert_close(turned, rotate(x, *rope(positions + 1000)), atol=2e-4, rtol=1e-4)
    assert rotate_by(x.bfloat16(), 3, rope).dtype == torch.bfloat16


def test_rotate_by_turns_as_the_text_was_turned() -> None:
    """A short distance in a long text, where angles depend on how far the text reaches."""
    x, positions = torch.randn(1, 2, 5, 16), torch.arange(95, 100)

    def rope(positions: Tensor) -> tuple[Tensor, Tensor]:
        return angles(positions / (4 if int(positions.max()) >= 64 else 1), 16, 1.0)

    turned = rotate_by(rotate(x, *rope(positions)), 10, rope, text=100)
    assert_close(turned, rotate(x, *rope(positions + 10)), atol=2e-4, rtol=1e-4)
