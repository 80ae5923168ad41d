"""Attention with a sink logit against one softmax that has it as a further term."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels import sink_logits
from kernels.dispatch import use_backend
from kernels.reference import Segment
from tests.kernels.op_cases import random

SINKS = torch.tensor([-3.0, 0.0, 2.5, 40.0])  # the last takes nearly all
GROUPS, GROUP = 2, 2
backends = pytest.mark.parametrize("backend", ["torch", "cpu"])


def by_definition(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Softmax over tokens and sink; the sink's weight is dropped."""
    k, v = k.repeat_interleave(GROUP, 1), v.repeat_interleave(GROUP, 1)
    new, stored = q.shape[2], k.shape[2]
    behind = torch.arange(stored - new, stored).unsqueeze(1) - torch.arange(stored)
    logits = (q @ k.mT * scale).masked_fill((behind < 0) | (behind >= window), float("-inf"))
    sinks = SINKS.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ v


@backends
@pytest.mark.parametrize("new", [1, 5, 40])
@pytest.mark.parametrize("window", [3, 40])
def test_prompts(backend: str, new: int, window: int) -> None:
    q, k, v = random(1, 2, 4, new, 16), random(2, 2, 2, 40, 16), random(3, 2, 2, 40, 16)
    wanted = by_definition(q, k, v, 0.3, window)
    with use_backend(backend):
        assert_close(sink_logits.windowed_attention(q, k, v, 0.3, window, SINKS), wanted)
        if window == 40:
            assert_close(sink_logits.causal_attention(q, k, v, 0.3, SINKS), wanted)


@backends
def test_a_step_over_segments(backend: str) -> None:
    q, k, v = random(1, 2, 4, 1, 16), random(2, 2, 2, 30, 16), random(3, 2, 2, 30, 16)
    rows = torch.arange(5, 20).expand(2, 2, -1)
    segments = [Segment(k[:, :, :5], v[:, :, :5]), Segment(k, v, rows=rows), Segment(k[:, :, 20:], v[:, :, 20:])]
    with use_backend(backend):
        assert_close(sink_logits.segment_attention(q, segments, 0.3, SINKS), by_definition(q, k, v, 0.3, 30))


def test_without_a_sink_it_is_the_plain_operation() -> None:
    q, k, v = random(1, 1, 4, 7, 16), random(2, 1, 2, 9, 16), random(3, 1, 2, 9, 16)
    far_below = torch.full((4,), -1e4)
    for one in (
        lambda sinks: sink_logits.causal_attention(q, k, v, 0.3, sinks),
        lambda sinks: sink_logits.windowed_attention(q, k, v, 0.3, 4, sinks),
        lambda sinks: sink_logits.segment_attention(q[:, :, :1], [Segment(k, v)], 0.3, sinks),
        lambda sinks: sink_logits.softmax(q.view(1, 2, 2, 7, 16), sinks),
    ):
        assert_close(one(None), one(far_below))
