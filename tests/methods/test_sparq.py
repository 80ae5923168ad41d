"""SparQ against loops: channels, scaled logits, the sum over a group, the mean of values, and the bytes it moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from methods.sparq import SparQ
from tests.methods.synthetic import SHAPES, Sequences, Shape, attention

METHOD = SparQ(r=9, sinks=3, recent_ratio=0.25, mean_value=False, channel_copy=True)
PROMPT, STEPS, BUDGET = 83, 3, 23
SINKS, LOCAL, TOP = 3, 5, 15
MIDDLE = range(SINKS, PROMPT - LOCAL)


def _approximate(q: Tensor, k: Tensor, r: int) -> Tensor:
    """Logits [g N] of one KV head. q [g D], k [N D]"""
    channels = q.abs().sum(0).argsort(descending=True)[:r].tolist()
    logits = torch.zeros(len(q), len(k), dtype=torch.float64)
    for h in range(len(q)):
        covered = sum(abs(q[h, c].item()) for c in channels) / q[h].abs().sum().item()
        for c in channels:
            logits[h] += q[h, c] * k[:, c] / (q.shape[1] * covered) ** 0.5
    return logits


def _expected(s: Sequences, position: int, r: int, mean_value: bool) -> tuple[Tensor, list[list[list[int]]]]:
    """The output [B H 1 D] of the step at `position`, and the prompt tokens it read."""
    shape, scale, group = s.shape, s.shape.dim**-0.5, s.shape.heads // s.shape.groups
    q, k, v = s.q(0)[:, :, position].double(), s.k(0).double()[:, :, : position + 1], s.v[0].double()
    v = v[:, :, : position + 1]
    read, shares = [], torch.ones(shape.batch, shape.heads, 1, 1, dtype=torch.float64)
    for b in range(shape.batch):
        read.append([])
        for i in range(shape.groups):
            heads = slice(i * group, i * group + group)
            logits = _approximate(q[b, heads], k[b, i], r)
            best = logits.sum(0)[MIDDLE.start : MIDDLE.stop].argsort(descending=True)[:TOP] + SINKS
            chosen = [*range(SINKS), *sorted(best.tolist()), *range(PROMPT - LOCAL, PROMPT)]
            read[-1].append(chosen)
            shares[b, heads, 0, 0] = logits.softmax(-1)[:, [*chosen, *range(PROMPT, position + 1)]].sum(-1)
    everything = [[[*head, *range(PROMPT, position + 1)] for head in sequence] for sequence in read]
    out = attention(q.unsqueeze(2), k, v, everything, scale)
    if mean_value:
        out = shares * out + (1 - shares) * v.mean(2, keepdim=True).repeat_interleave(group, 1)
    return out, read


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean_value", [False, True], ids=["plain", "mean"])
@pytest.mark.parametrize("channel_copy", [False, True], ids=["picked", "copy"])
@pytest.mark.parametrize("placement", ["device", "host"])
def test_step_equals_loops(shape: Shape, mean_value: bool, channel_copy: bool, placement: str) -> None:
    s = Sequences(shape, PROMPT + STEPS).sharpened(4)
    layers = s.start(replace(METHOD, mean_value=mean_value, channel_copy=channel_copy), BUDGET, placement=placement)
    s.seal(layers, 0, PROMPT)
    for position in range(PROMPT, s.length):
        (out,) = s.decode(layers, position)
        wanted, read = _expected(s, position, METHOD.r, mean_value)
        assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
        positions = layers[0].read_positions()
        assert positions.sort(-1).values.tolist() == read
    assert layers[0].attended == (BUDGET, STEPS)


def test_a_reused_selection_scores_nothing() -> None:
    s = Sequences(SHAPES[1], PROMPT + STEPS).sharpened(4)
    layers = s.start(replace(METHOD, mean_value=True), BUDGET, placement="host", reuse_steps=1)
    s.seal(layers, 0, PROMPT)
    moved = []
    for position in range(PROMPT, s.length):
        before = layers[0].cache.traffic.to_device_bytes
        s.decode(layers, position)
        moved.append(layers[0].cache.traffic.to_device_bytes - before)
    rows = TOP * 2 * 96 * 2 * 2 * 4
    assert moved == [moved[0], rows, moved[0]]
    assert moved[0] > rows
