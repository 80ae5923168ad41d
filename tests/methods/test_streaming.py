"""StreamingLLM against the paper's own bookkeeping: kept keys rotated to their places in the cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels.rope import rotate
from methods.streaming import Streaming
from tests.methods.synthetic import SHAPES, Sequences, Shape, attention

PROMPT, STEPS, BUDGET, SINKS = 83, 4, 23, 4
KEPT = [*range(SINKS), *range(PROMPT - (BUDGET - SINKS), PROMPT)]


def expected(s: Sequences, position: int, positions: str) -> Tensor:
    """Attention over sinks, window and what came since, [B H 1 D]."""
    tokens = [*KEPT, *range(PROMPT, position + 1)]
    places = torch.arange(len(tokens)) if positions == "cache" else torch.tensor(tokens)
    cos, sin = s.rope(places)
    k = rotate(s.raw_k[0][:, :, tokens], cos, sin)
    q = rotate(s.project(0, s.hidden[0][:, position : position + 1]), cos[:, -1:], sin[:, -1:])
    everything = [[list(range(len(tokens)))] * s.shape.groups] * s.shape.batch
    return attention(q, k, s.v[0][:, :, tokens], everything, s.shape.dim**-0.5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("positions", ["cache", "original"])
def test_a_step_is_the_papers(shape: Shape, positions: str) -> None:
    s = Sequences(shape, PROMPT + STEPS)
    layers = s.start(Streaming(sinks=SINKS, positions=positions), BUDGET)
    s.seal(layers, 0, PROMPT)
    for position in range(PROMPT, s.length):
        (out,) = s.decode(layers, position)
        assert_close(out, expected(s, position, positions), atol=2e-5, rtol=2e-5)
        read = layers[0].read_positions()
        assert read.tolist() == [[KEPT] * shape.groups] * shape.batch
    assert layers[0].attended == (BUDGET, STEPS)


def test_a_further_turn_turns_the_sinks_on() -> None:
    """By what both turns evicted; a cache that goes on elsewhere is told where they are."""
    s, end = Sequences(SHAPES[1], 2 * PROMPT + STEPS), 2 * PROMPT
    (layer,) = layers = s.start(Streaming(sinks=SINKS, positions="cache"), BUDGET)
    s.seal(layers, 0, PROMPT)
    s.seal(layers, PROMPT, end)
    places = torch.arange(SINKS) + end - BUDGET
    assert layer.state()["0.rotated"][0, 0].tolist() == [*places.tolist(), *range(end - BUDGET + SINKS, end)]
    sinks = rotate(s.raw_k[0][:, :, :SINKS], *s.rope(places))
    assert_close(layer.state()["k0"][:, :, :SINKS], sinks, atol=2e-5, rtol=2e-5)
