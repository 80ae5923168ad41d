"""SnapKV against loops: votes, pooling, and what is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from harness.engine.footprint import footprint
from methods.base import Budget
from methods.snapkv import SnapKV
from tests.methods.recorded import Recorded
from tests.methods.synthetic import SHAPES, Sequences, Shape, attention

METHOD = SnapKV(window=7, kernel=5, pooling="avg", select_per="kv_head")
PROMPT, STEPS, BUDGET = 77, 3, 20


def _sequences(shape: Shape, length: int = PROMPT + STEPS, **more: int) -> Sequences:
    return Sequences(shape, length, **more).sharpened(6)


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
    s = _sequences(shape)
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


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("kernel", [7, 15])
def test_on_a_models_keys_each_query_head_keeps_what_the_released_code_keeps(kernel: int) -> None:
    """Its LongBench runs: window 32, max pooling, keys and values repeated to the query heads before anything else."""
    prompt = 650
    s = Recorded(prompt, layers=[0, 14, 29])
    method = SnapKV(window=32, kernel=kernel, pooling="max", select_per="query_head")
    layers = s.start(method, prompt // 5)
    s.seal(layers, 0, prompt)
    for index, layer in enumerate(layers):
        _check_kept(layer.positions, _pooled(_votes(s, 32, prompt, index), kernel, "max"), 32, prompt)


def test_max_pooling_after_the_group_mean_differs_from_before() -> None:
    shape, s = SHAPES[1], _sequences(SHAPES[1])
    votes = _votes(s, 7, PROMPT).unflatten(1, (shape.groups, -1))
    after, before = _pooled(votes.mean(2), 5, "max"), _pooled(votes, 5, "max").mean(2)
    assert not torch.equal(after.topk(13).indices.sort().values, before.topk(13).indices.sort().values)


def test_query_heads_with_their_own_tokens_cost_a_copy_each() -> None:
    s = _sequences(SHAPES[1])
    sizes = []
    for select_per in ("kv_head", "query_head"):
        layers = s.start(replace(METHOD, select_per=select_per), BUDGET)
        s.seal(layers, 0, PROMPT)
        sizes.append(footprint(layers)["device"])
    assert sizes[1] == 3 * sizes[0]


def test_union_of_query_heads_is_what_a_kv_head_read() -> None:
    s = _sequences(SHAPES[1])
    layers = s.start(replace(METHOD, select_per="query_head"), BUDGET)
    s.seal(layers, 0, PROMPT)
    union = layers[0].read_positions()
    assert union is not None
    for b in range(2):
        for group in range(2):
            wanted = {int(j) for j in layers[0].positions[b, 3 * group : 3 * group + 3].flatten()}
            found = [int(j) for j in union[b, group] if j >= 0]
            assert found == sorted(wanted)


@pytest.mark.parametrize("select_per", ["kv_head", "query_head"])
def test_a_further_turn_shorter_than_the_window_votes_with_its_own_queries(select_per: str) -> None:
    shape, end = SHAPES[1], PROMPT + 5
    s = _sequences(shape, end)
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


def test_a_turn_that_was_read_whole_is_not_said_of_the_next() -> None:
    s = Sequences(SHAPES[1], 60)
    (layer,) = s.start(METHOD, Budget(0.5))
    s.seal([layer], 0, 6)
    assert "6 prompt tokens" in str(layer.fallback)
    s.seal([layer], 6, 60)
    assert layer.evicted
    assert layer.fallback is None


def test_scores_do_not_depend_on_absolute_positions() -> None:
    kept = []
    for shift in (0, 1000):
        s = _sequences(SHAPES[1], shift=shift)
        layers = s.start(METHOD, BUDGET)
        s.seal(layers, 0, PROMPT)
        kept.append(layers[0].read_positions())
    assert torch.equal(*kept)


@pytest.mark.parametrize(
    "change", [{"window": 0}, {"kernel": 4}, {"pooling": "mean"}, {"select_per": "head"}], ids=lambda c: next(iter(c))
)
def test_wrong_parameters_are_named(change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(METHOD, **change)
