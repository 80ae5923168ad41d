"""PyramidKV: the layers' amounts, as the authors' scripts give them, and what each layer keeps of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from methods.layers import Layer
from methods.pyramidkv import PyramidKV
from tests.methods.synthetic import Sequences, Shape

METHOD = PyramidKV(window=8, kernel=7, pooling="max", select_per="kv_head", beta=20)


def released(layer: int, layers: int, budget: int, prompt: int, window: int = 8, beta: int = 20) -> int:
    """What the authors' code keeps in a layer, in whole numbers throughout."""
    voted = budget - window
    if prompt < 2 * voted:
        return budget
    last = voted // beta
    first = min(2 * voted - last, prompt - window)
    last = 2 * voted - first
    return window + first - layer * ((first - last) // (layers - 1))


@pytest.mark.parametrize("layers", [2, 3, 30, 32])
@pytest.mark.parametrize(("budget", "prompt"), [(131, 1316), (263, 1316), (658, 1316), (2048, 31500), (512, 520)])
def test_a_layer_keeps_what_the_released_code_keeps_and_all_together_the_budget(
    layers: int, budget: int, prompt: int
) -> None:
    """Theirs rounds the step down, so that it keeps up to a token per layer more the higher it comes."""
    ours = METHOD.layer_budgets(budget, prompt, layers)
    theirs = [released(layer, layers, budget, prompt) for layer in range(layers)]
    assert all(-2 < their - our < layer + 2 for layer, (our, their) in enumerate(zip(ours, theirs, strict=True)))
    assert sum(ours) == layers * budget <= sum(theirs) + layers


@pytest.mark.parametrize("layers", [2, 3, 30, 32])
@pytest.mark.parametrize(("budget", "prompt"), [(65, 1316), (263, 1316), (658, 1316), (2048, 31500), (512, 520)])
def test_released_rounding_is_the_released_codes(layers: int, budget: int, prompt: int) -> None:
    theirs = [released(layer, layers, budget, prompt) for layer in range(layers)]
    assert replace(METHOD, rounding="released").layer_budgets(budget, prompt, layers) == theirs


def sealed(method: PyramidKV, budget: int, prompt: int, layers: int = 3) -> tuple[Sequences, list[Layer]]:
    text = Sequences(Shape(6, 2, 64), prompt + 1, layers)
    made = text.start(method, budget)
    text.seal(made, 0, prompt)
    return text, [layer for layer in made if isinstance(layer, Layer)]


def test_layers_read_their_amounts_and_the_last_may_keep_its_window_alone() -> None:
    text, layers = sealed(replace(METHOD, beta=1000.0), budget=9, prompt=77)
    text.decode(layers, 77)
    assert [layer.attended.prompt for layer in layers] == [10, 9, 8]
    assert [layer.fallback for layer in layers] == [None] * 3


@pytest.mark.parametrize(("budget", "layers"), [(60, 3), (20, 1)], ids=["more than half", "one layer"])
def test_where_no_pyramid_can_be_layers_keep_the_same_and_say_so(budget: int, layers: int) -> None:
    _, made = sealed(METHOD, budget, prompt=77, layers=layers)
    assert [layer.positions.shape[2] for layer in made] == [budget] * layers
    assert all(layer.fallback for layer in made)


def test_each_layer_keeps_its_best_votes_and_the_window() -> None:
    check_kept(Sequences(Shape(6, 2, 64), 203, layers=3), budget=30)


def check_kept(text: Sequences, budget: int) -> None:
    """One sequence, 8 queries, max pooling over 7 tokens, per query head as released; ties may fall either way."""
    layers, prompt = text.start(replace(METHOD, select_per="query_head"), budget), text.length
    text.seal(layers, 0, prompt)
    for index, layer in enumerate(layers):
        amount = released(index, len(layers), budget, prompt)
        assert amount - index - 2 < layer.positions.shape[2] < amount + 2
        for head, rows in enumerate(layer.positions[0]):
            assert rows[-8:].tolist() == list(range(prompt - 8, prompt))
            votes = _votes(text.q(index)[0, head], text.k(index)[0, head // layer.spec.group])
            taken = torch.zeros(prompt - 8, dtype=torch.bool)
            taken[rows[:-8]] = True
            assert votes[taken].min() >= votes[~taken].max() - 1e-6


def _votes(q: Tensor, k: Tensor) -> Tensor:
    """Of the last 8 queries of one head, for all tokens before them."""
    sums = torch.zeros(len(k))
    for t in range(len(k) - 8, len(k)):
        sums[: t + 1] += (k[: t + 1] @ q[t] * k.shape[1] ** -0.5).softmax(0)
    return max_pool1d(sums[None, :-8], 7, stride=1, padding=3)[0]
