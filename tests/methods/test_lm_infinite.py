"""LM-Infinite against loops that rotate each pair by the distance it is read at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels.rope import rotate
from methods.lm_infinite import LMInfinite
from tests.methods.synthetic import SHAPES, Sequences, Shape

METHOD = LMInfinite(n_init=3)
PROMPT, STEPS, BUDGET = 61, 4, 19
LOCAL = BUDGET - 3


def _expected(s: Sequences, position: int, kept: list[int]) -> Tensor:
    """[B H D]: every key of `kept` at its distance, but none further than the window is long"""
    shape, group = s.shape, s.shape.heads // s.shape.groups
    q = s.project(0, s.hidden[0])[:, :, position]
    out = torch.zeros(shape.batch, shape.heads, shape.dim)
    distances = torch.tensor([min(position - j, LOCAL) if j < 3 else position - j for j in kept])
    cos, sin = s.rope(distances)
    for b in range(shape.batch):
        for h in range(shape.heads):
            turned = rotate(q[b, h].expand(1, 1, len(kept), -1), cos, sin)[0, 0]
            weights = ((turned * s.raw_k[0, b, h // group, kept]).sum(-1) * shape.dim**-0.5).softmax(0)
            out[b, h] = weights @ s.v[0, b, h // group, kept]
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_prompt_and_steps_equal_loops(shape: Shape) -> None:
    s = Sequences(shape, PROMPT + STEPS)
    layers = s.start(METHOD, BUDGET)
    (out,) = s.prefill(layers, 0, PROMPT)
    for p in range(PROMPT):
        near = range(max(0, p - LOCAL + 1), p + 1)
        assert_close(out[:, :, p], _expected(s, p, sorted({*range(min(3, p + 1)), *near})), atol=1e-5, rtol=1e-4)
    layers[0].seal()
    for p in range(PROMPT, s.length):
        (out,) = s.decode(layers, p)
        assert_close(out[:, :, 0], _expected(s, p, [0, 1, 2, *range(PROMPT - LOCAL, p + 1)]), atol=1e-5, rtol=1e-4)
    assert layers[0].attended == (BUDGET, STEPS)


def test_a_further_turn_is_windowed_over_what_is_left() -> None:
    s = Sequences(SHAPES[1], PROMPT + 8)
    layers = s.start(METHOD, BUDGET)
    s.seal(layers, 0, PROMPT)
    (out,) = s.prefill(layers, PROMPT, s.length)
    for i, p in enumerate(range(PROMPT, s.length)):
        assert_close(out[:, :, i], _expected(s, p, [0, 1, 2, *range(p - LOCAL + 1, p + 1)]), atol=1e-5, rtol=1e-4)
