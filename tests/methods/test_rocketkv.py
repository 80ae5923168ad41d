"""RocketKV against loops: how a budget is split, what is kept at the seal, what a step reads of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from methods.base import Budget
from methods.rocketkv import RocketKV
from tests.methods.synthetic import SHAPES, Sequences, Shape, assert_best, attention
from tests.methods.test_snapkv import _check_kept, _pooled, _votes

METHOD = RocketKV(window=7, kernel=5)
PROMPT, STEPS, BUDGET = 150, 3, 10


def _sequences(shape: Shape, length: int = PROMPT + STEPS) -> Sequences:
    """Query heads of a group differ in size, and so do channels."""
    sequences = Sequences(shape, length).sharpened(3)
    sequences.weight.unflatten(2, (shape.heads, -1))[..., ::5] *= 3
    return sequences


def _page_weights(q: Tensor, keys: Tensor, size: int, r: int) -> Tensor:
    """What each page gets of the query heads of a group. q [g D], keys [S D] in fp64 -> [P]"""
    channels = q.abs().sum(0).argsort(descending=True)[:r]
    total = torch.zeros(-(-len(keys) // size), dtype=torch.float64)
    for head in q:
        logits = torch.zeros_like(total)
        for p, page in enumerate(keys.split(size)):
            extremes = torch.where(q.sum(0) > 0, page.amax(0), page.amin(0))
            logits[p] = (head * extremes)[channels].sum()
        covered = head[channels].abs().sum() / head.abs().sum()
        total += (logits * (q.shape[1] * covered) ** -0.5).softmax(0)
    return total


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "changes",
    [{}, {"page_size": 4, "r": 9}, {"page_size": 1, "r": 9}, {"split": 0.0}, {"split": 1.0}, {"pooling": "avg"}],
    ids=str,
)
def test_both_stages_equal_loops(shape: Shape, changes: dict) -> None:
    s, method, group = _sequences(shape), replace(METHOD, **changes), shape.heads // shape.groups
    (layer,) = s.start(method, BUDGET)
    s.prefill([layer], 0, PROMPT, chunk=11)
    layer.seal()
    count = method.keeps(BUDGET, PROMPT)
    assert 2 * BUDGET <= count <= PROMPT
    kept = torch.arange(PROMPT).expand(shape.batch, shape.groups, -1)
    if count < PROMPT:
        kept = layer.positions
        votes = _votes(s, 7, PROMPT).unflatten(1, (shape.groups, -1)).sum(2)
        _check_kept(kept, _pooled(votes, 5, method.pooling), 7, PROMPT)
    assert kept.shape[2] == count
    size, r = method.pages(BUDGET, count, shape.dim)
    for position in range(PROMPT, s.length):
        (out,) = s.decode([layer], position)
        chosen, read = layer.reads.rows, layer.read_positions()
        assert torch.equal(read, kept.gather(2, chosen))
        q = s.q(0)[:, :, position].unflatten(1, (shape.groups, group)).double()
        for b, i in product(range(shape.batch), range(shape.groups)):
            weights = _page_weights(q[b, i], s.k(0)[b, i, kept[b, i]].double(), size, r)
            assert_best(chosen[b, i], weights.repeat_interleave(size)[:count], BUDGET)
        tokens = [[[*head, *range(PROMPT, position + 1)] for head in sequence] for sequence in read.tolist()]
        wanted = attention(s.q(0)[:, :, position, None], s.k(0), s.v[0], tokens, shape.dim**-0.5)
        assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    assert layer.attended == (BUDGET, STEPS)


@pytest.mark.parametrize(
    ("changes", "budget", "named"),
    [
        ({}, 0.1, []),
        ({}, 0.2, ["pages"]),
        ({}, 0.5, ["eviction", "pages"]),
        ({"page_size": 1}, 0.2, []),  # what a parameter switches off is not named
        ({"split": 0.0, "page_size": 1}, 0.6, []),
    ],
)
def test_what_a_large_budget_leaves_out_is_named(changes: dict, budget: float, named: list[str]) -> None:
    (layer,) = (s := _sequences(SHAPES[0])).start(replace(METHOD, **changes), Budget(budget))
    s.seal([layer], 0, PROMPT)
    assert [part for part in ("eviction", "pages") if part in (layer.fallback or "")] == named
    assert (layer.fallback is None) == (not named)


def test_the_papers_own_example() -> None:
    """64 times: 10.3 by eviction, 6.2 by selection, which are pages of 3 tokens and 2.1 by channels."""
    budget, prompt = 512, 65536
    kept = RocketKV().keeps(budget, prompt)
    assert prompt / kept == pytest.approx(10.3, abs=0.05)
    assert kept / (2 * budget) == pytest.approx(6.2, abs=0.05)
    size, r = RocketKV().pages(budget, kept, 128)
    assert size == 3
    assert 128 / r == pytest.approx(2.1, abs=0.05)


def test_a_further_turn_chooses_among_what_is_left() -> None:
    s, end = _sequences(SHAPES[1], PROMPT + 40), PROMPT + 30
    (layer,) = s.start(METHOD, Budget(0.1))
    s.seal([layer], 0, PROMPT)
    before = layer.positions
    s.decode([layer], PROMPT)
    s.seal([layer], PROMPT + 1, end)
    after = layer.positions
    assert after.shape[2] == METHOD.keeps(end // 10, end)
    s.decode([layer], end)
    assert layer.attended.prompt == end // 10
    for old, new, read in zip(
        *(x.flatten(0, 1).tolist() for x in (before, after, layer.read_positions())), strict=True
    ):
        assert set(read) <= set(new) <= {*old, *range(PROMPT, end)}
