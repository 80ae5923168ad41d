"""SnapKV against loops: votes, pooling, and what is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from methods.snapkv import SnapKV
from tests.methods.synthetic import SHAPES, Sequences, Shape, attention

METHOD = SnapKV(window=7, kernel=5, pooling="avg", select_per="kv_head")
PROMPT, STEPS, BUDGET = 77, 3, 20


def _votes(s: Sequences, window: int, prompt: int, layer: int = 0) -> Tensor:
    """[B H S] in fp64: weights of the last queries, summed; the window's own columns left out"""
    q, k, shape = s.q(layer).double(), s.k(layer).double(), s.shape
    votes = torch.zeros(shape.batch, shape.heads, prompt, dtype=torch.float64)
    for b in range(shape.batch):
        for h in range(shape.heads):
            for t in range(prompt - window, prompt):
                keys = k[b, h // (shape.heads // shape.groups), : t + 1]
                votes[b, h, : t + 1] += (keys @ q[b, h, t] * shape.dim**-0.5).softmax(0)
    return votes[..., : prompt - window]


def _pooled(votes: Tensor, kernel: int, pooling: str) -> Tensor:
    """By hand: a missing neighbour counts as zero, which for `max` is no vote either."""
    reach, count = kernel // 2, votes.shape[-1]
    out = torch.zeros_like(votes)
    for j in range(count):
        near = votes[..., max(0, j - reach) : j + reach + 1]
        out[..., j] = near.amax(-1) if pooling == "max" else near.sum(-1) / kernel
    return out


def _check_kept(kept: Tensor, scores: Tensor, window: int, prompt: int) -> None:
    """The window, and no token left out that scores better than one taken (ties of `max` may fall either way)."""
    for rows, score in zip(kept.flatten(0, 1), scores.flatten(0, 1), strict=True):
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert rows[-window:].tolist() == list(range(prompt - window, prompt))
        taken = torch.zeros(prompt - window, dtype=torch.bool)
        taken[rows[:-window]] = True
        assert score[taken].min() >= score[~taken].max() - 1e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("select_per", ["kv_head", "query_head"])
def test_keeps_the_best_votes_and_the_window(shape: Shape, pooling: str, select_per: str) -> None:
    s = Sequences(shape, PROMPT + STEPS).sharpened(6)
    layers = s.start(replace(METHOD, pooling=pooling, select_per=select_per), BUDGET)
    s.prefill(layers, 0, PROMPT, chunk=6)  # the window spans chunks
    layers[0].seal()
    votes = _votes(s, 7, PROMPT)
    if select_per == "kv_head":
        votes = votes.unflatten(1, (shape.groups, -1)).mean(2)
    kept = layers[0].positions  # [B G|H K]
    assert kept.shape == (*votes.shape[:2], BUDGET)
    _check_kept(kept, _pooled(votes, 5, pooling), 7, PROMPT)
    copies = kept.shape[1] // shape.groups
    k, v = (x.repeat_interleave(copies, 1) for x in (s.k(0), s.v[0]))
    for position in range(PROMPT, s.length):
        (out,) = s.decode(layers, position)
        read = [[[*head, *range(PROMPT, position + 1)] for head in sequence] for sequence in kept.tolist()]
        assert_close(out, attention(s.q(0)[:, :, position, None], k, v, read, shape.dim**-0.5))
    assert layers[0].attended == (BUDGET, STEPS)


@pytest.mark.parametrize("select_per", ["kv_head", "query_head"])
def test_a_further_turn_shorter_than_the_window_votes_with_its_own_queries(select_per: str) -> None:
    shape, end = SHAPES[1], PROMPT + 5
    s = Sequences(shape, end).sharpened(6)
    layers = s.start(replace(METHOD, select_per=select_per), BUDGET)
    s.seal(layers, 0, PROMPT)
    before = layers[0].positions
    s.decode(layers, PROMPT)
    s.seal(layers, PROMPT + 1, end)
    after = layers[0].positions
    assert after.shape == before.shape
    assert after[..., -7:].tolist() == torch.arange(end - 7, end).expand(*after.shape[:2], -1).tolist()
    for old, new in zip(before.flatten(0, 1).tolist(), after.flatten(0, 1).tolist(), strict=True):
        assert set(new) <= {*old, *range(PROMPT, end)}
