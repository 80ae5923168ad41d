"""H2O against loops over queries and heads: who is heavy, what is left, and how it goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from methods.h2o import H2O
from tests.methods.synthetic import SHAPES, Sequences, Shape, attention

METHOD = H2O(sinks=0, recent_ratio=0.5, compensation="none")
PROMPT, STEPS = 77, 4


def _column_sums(s: Sequences, queries: range) -> Tensor:
    """[B G S] in fp64, by loops: what every key received from these queries, over all heads of its group"""
    q, k, shape = s.q(0).double(), s.k(0).double(), s.shape
    sums = torch.zeros(shape.batch, shape.groups, s.length, dtype=torch.float64)
    for b in range(shape.batch):
        for h in range(shape.heads):
            group = h // (shape.heads // shape.groups)
            for t in queries:
                sums[b, group, : t + 1] += (k[b, group, : t + 1] @ q[b, h, t] * shape.dim**-0.5).softmax(0)
    return sums


def _expected(sums: Tensor, sinks: int, heavy: int, recent: int, prompt: int) -> list[list[list[int]]]:
    kept = []
    for row in sums[..., : prompt - recent].flatten(0, 1).tolist():
        order = sorted(range(sinks, prompt - recent), key=lambda j: -row[j])
        kept.append(sorted([*range(sinks), *order[:heavy], *range(prompt - recent, prompt)]))
    return [kept[i : i + sums.shape[1]] for i in range(0, len(kept), sums.shape[1])]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sinks", [0, 5])
def test_keeps_heavy_hitters_and_recent_tokens_and_reads_them_exactly(shape: Shape, sinks: int) -> None:
    s, budget = Sequences(shape, PROMPT + STEPS).sharpened(6), 24
    s.raw_k[..., PROMPT - 14 : PROMPT - 8, :] *= 9  # some heads choose the last tokens before the recent ones
    layers = s.start(replace(METHOD, sinks=sinks), budget)
    s.seal(layers, 0, PROMPT)
    recent = (budget - sinks) // 2
    kept = _expected(_column_sums(s, range(PROMPT)), sinks, budget - sinks - recent, recent, PROMPT)
    for position in range(PROMPT, s.length):
        (out,) = s.decode(layers, position)
        read = [[[*head, *range(PROMPT, position + 1)] for head in sequence] for sequence in kept]
        assert_close(out, attention(s.q(0)[:, :, position, None], s.k(0), s.v[0], read, shape.dim**-0.5))
    positions = layers[0].read_positions()
    assert positions.tolist() == kept
    assert layers[0].attended == (budget, STEPS)


@pytest.mark.parametrize(("compensation", "kept"), [("none", 51), ("literal", 53), ("bytes", 52)])
def test_compensated_h2o_keeps_its_share_of_the_prompt_more(compensation: str, kept: int) -> None:
    s = Sequences(Shape(2, 2, 64), 258)
    layers = s.start(replace(METHOD, compensation=compensation), 0.2)  # 51 of 257; 257/128 = 2, 257/256 = 1
    s.seal(layers, 0, 257)
    s.decode(layers, 257)
    assert layers[0].attended.prompt == kept


def test_a_further_turn_evicts_by_all_queries_so_far() -> None:
    """Replays the second seal: what was kept brings its sums, and generated and new tokens have added theirs."""
    shape, first, second = Shape(2, 2, 64), 40, 60
    s = Sequences(shape, 64).sharpened(6)
    layers = s.start(METHOD, 12)
    s.seal(layers, 0, first)
    kept = layers[0].read_positions()
    sums = _column_sums(s, range(first))
    for t in range(first, second):
        if t < first + 3:
            s.decode(layers, t)
        for h in range(2):
            read = torch.cat([kept[0, h], torch.arange(first, t + 1)])
            weights = (s.k(0)[0, h, read].double() @ s.q(0)[0, h, t].double() * 64**-0.5).softmax(0)
            sums[0, h, read] += weights
    s.seal(layers, first + 3, second)
    for h in range(2):
        candidates = [j for j in [*kept[0, h].tolist(), *range(first, second)] if j < second - 6]
        heavy = sorted(candidates, key=lambda j: -sums[0, h, j])[:6]
        positions = layers[0].read_positions()
        assert positions[0, h].tolist() == sorted(heavy) + list(range(second - 6, second))
