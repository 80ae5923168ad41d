"""KIVI against its rule in loops: which tokens are codes, what they are worth, and what attention makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from methods.kivi import Kivi
from methods.layers.batched import alone_because
from tests.methods.synthetic import Sequences, Shape

SMALL = Kivi(bits=4, group=8, residual=16)


def below(number: float) -> float:
    """The next fp16 that is not above it."""
    near = np.float16(number)
    return float(near if float(near) <= number else np.nextafter(near, np.float16(-np.inf)))


def coded(numbers: Tensor, bits: int) -> Tensor:
    """A group of numbers as codes between its ends, and back."""
    least = below(float(numbers.min()))
    step = -below(float((least - numbers.max()) / (2**bits - 1)))
    return least + ((numbers - least) / step).round() * step


def plain(s: Sequences, method: Kivi, sealed: int, length: int) -> tuple[Tensor, Tensor]:
    """K and V as KIVI has them when `length` tokens have come, `sealed` of them at once. [B G length D]"""
    k, v = s.k(0)[:, :, :length].clone(), s.v[0][:, :, :length].clone()
    count = sealed // method.residual * method.residual
    while count + method.residual <= length:
        count += method.residual
    channels = min(method.group, s.shape.dim)
    for b in range(s.shape.batch):
        for g in range(s.shape.groups):
            for first in range(0, count, method.group):
                tokens = slice(first, first + method.group)
                for channel in range(s.shape.dim):
                    k[b, g, tokens, channel] = coded(k[b, g, tokens, channel], method.bits)
            for token in range(length - method.residual):
                for first in range(0, s.shape.dim, channels):
                    part = slice(first, first + channels)
                    v[b, g, token, part] = coded(v[b, g, token, part], method.bits)
    return k, v


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return (q @ k.mT * q.shape[3] ** -0.5).softmax(-1) @ v


@pytest.mark.parametrize(
    ("bits", "placement", "shape"),
    [(2, "host", Shape(4, 1, 24)), (4, "device", Shape(6, 2, 16, batch=2)), (8, "disk", Shape(4, 1, 8))],
    ids=str,
)
def test_attention_over_codes_and_waiting_tokens(bits: int, placement: str, shape: Shape) -> None:
    """The prompt leaves 5 tokens waiting; the 11th and the 27th generated token fill a block."""
    s, sealed, method = Sequences(shape, 70), 37, replace(SMALL, bits=bits)
    layers = s.start(method, None, placement=placement)
    s.seal(layers, 0, sealed)
    for position in range(sealed, 70):
        (out,) = s.decode(layers, position)
        if position in (37, 47, 48, 69):
            k, v = plain(s, method, sealed, position)  # the token before has its block made after its step
            now = slice(position, position + 1)
            k, v = torch.cat([k, s.k(0)[:, :, now]], 2), torch.cat([v, s.v[0][:, :, now]], 2)
            assert_close(out, attention(s.q(0)[:, :, now], k, v), atol=1e-5, rtol=1e-4)
    assert layers[0].attended == (sealed, 33)
    assert (alone_because(layers[0]) is None) == (placement == "device")


def test_a_further_turn_has_the_last_values_exactly() -> None:
    """Those that no step has read as codes yet: `residual` of them, over the end of the last block of codes."""
    s = Sequences(Shape(4, 2, 32, batch=2), 60)
    layers = s.start(SMALL, None)
    s.seal(layers, 0, 40)
    s.decode(layers, 40)
    layer: Any = layers[0]
    assert (layer.far.length, layer.store.length) == (32, 9)
    layer.reopen()
    exact = (layer.store.v == s.v[0][:, :, :41]).all(-1).all(1).all(0)
    assert exact.tolist() == [False] * 25 + [True] * 16
    assert layer.recent is None
