"""Ada-KV against loops: what every head gets of the common budget, and what is left."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from methods.ada_pyramid import AdaPyramid
from methods.adakv import AdaKV
from tests.methods.synthetic import SHAPES, Sequences, Shape, attention
from tests.methods.test_snapkv import _pooled, _votes

METHOD = AdaKV(window=7, kernel=5)
PROMPT, STEPS, BUDGET = 77, 3, 20


def sequences(shape: Shape, length: int = PROMPT + STEPS) -> Sequences:
    """The query heads of the first KV head are decided, those of the others are not."""
    made = Sequences(shape, length)
    made.weight.unflatten(2, (shape.groups, -1, shape.dim))[:, :, 0] *= 6
    return made


def shares(scores: Tensor, each: int, floor: Fraction) -> list[int]:
    """By hand, for one sequence. scores [G M]"""
    ranked = sorted(((score, head) for head, row in enumerate(scores.tolist()) for score in row), reverse=True)
    won = [head for _, head in ranked[: each * len(scores)]]
    wishes = [(1 - floor) * won.count(head) + floor * each for head in range(len(scores))]
    given_out = [int(wish) for wish in wishes]
    by_rest = sorted(range(len(wishes)), key=lambda head: given_out[head] - wishes[head])
    for head in by_rest[: each * len(scores) - sum(given_out)]:
        given_out[head] += 1
    return given_out


def kept_by(layer: object) -> list[list[list[int]]]:
    return [[[p for p in head if p >= 0] for head in one] for one in layer.positions.tolist()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("floor", [0.0, 0.25, 1.0])
def test_each_head_keeps_its_share_of_the_best_votes_and_the_window(shape: Shape, floor: float) -> None:
    s = sequences(shape)
    (layer,) = s.start(replace(METHOD, floor=floor), BUDGET)
    s.prefill([layer], 0, PROMPT, chunk=6)
    layer.seal()
    scores = _pooled(_votes(s, 7, PROMPT).unflatten(1, (shape.groups, -1)).mean(2), 5, "max")
    kept = kept_by(layer)
    for mine, score in zip(kept, scores, strict=True):
        assert [len(head) - 7 for head in mine] == shares(score, BUDGET - 7, Fraction(floor))
        for rows, votes in zip(mine, score, strict=True):
            assert rows == sorted(set(rows))
            assert rows[-7:] == list(range(PROMPT - 7, PROMPT))
            taken = torch.zeros(PROMPT - 7, dtype=torch.bool)
            taken[rows[:-7]] = True
            if 7 < len(rows) < PROMPT:
                assert votes[taken].min() >= votes[~taken].max() - 1e-6
    for position in range(PROMPT, s.length):
        (out,) = s.decode([layer], position)
        read = [[[*head, *range(PROMPT, position + 1)] for head in one] for one in kept]
        assert_close(out, attention(s.q(0)[:, :, position, None], s.k(0), s.v[0], read, shape.dim**-0.5))
    assert layer.attended == (BUDGET, STEPS)


def test_a_further_turn_votes_among_what_every_head_still_has() -> None:
    again = PROMPT + 30
    s = sequences(SHAPES[1], again + 1)
    (layer,) = s.start(METHOD, BUDGET)
    s.seal([layer], 0, PROMPT)
    first = kept_by(layer)
    (out,) = s.prefill([layer], PROMPT, again)
    read = [[[*head, *range(PROMPT, again)] for head in one] for one in first]
    assert_close(out[:, :, -1:], attention(s.q(0)[:, :, again - 1, None], s.k(0), s.v[0], read, s.shape.dim**-0.5))
    layer.seal()
    for before, after in zip(first, kept_by(layer), strict=True):
        assert sum(map(len, after)) == BUDGET * len(after)
        for old, new in zip(before, after, strict=True):
            assert set(new) <= {*old, *range(PROMPT, again)}
            assert new[-7:] == list(range(again - 7, again))
    read = [[[*head, again] for head in one] for one in kept_by(layer)]
    (out,) = s.decode([layer], again)
    assert_close(out, attention(s.q(0)[:, :, again, None], s.k(0), s.v[0], read, s.shape.dim**-0.5))


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_of_a_pyramid_divide_what_each_gets_among_their_heads(shape: Shape) -> None:
    """By hand: the amounts that PyramidKV gives the layers, and in each the shares that Ada-KV gives the heads."""
    layers, method = 3, AdaPyramid(window=7, kernel=5, beta=4, floor=0.25)
    s = Sequences(shape, PROMPT, layers)
    made = s.start(method, BUDGET)
    s.seal(made, 0, PROMPT)
    amounts = []
    for index, layer in enumerate(made):
        scores = _pooled(_votes(s, 7, PROMPT, index).unflatten(1, (shape.groups, -1)).mean(2), 5, "max")
        for mine, score in zip(kept_by(layer), scores, strict=True):
            amounts.append(sum(map(len, mine)) // shape.groups)
            assert [len(head) - 7 for head in mine] == shares(score, amounts[-1] - 7, Fraction(1, 4))
            for rows, votes in zip(mine, score, strict=True):
                best = torch.topk(votes, len(rows) - 7).values
                assert torch.equal(votes[rows[:-7]].sort(descending=True).values, best)
    voted = [sum(amounts[batch :: s.k(0).shape[0]]) - 7 * layers for batch in range(s.k(0).shape[0])]
    assert voted == [layers * (BUDGET - 7)] * len(voted)
    assert amounts[0] > BUDGET > amounts[-1] > 7
