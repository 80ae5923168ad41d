"""TriAttention's scores and choice, as a series of phases and amplitudes in plain loops."""

from __future__ import annotations

from cmath import phase
from math import cos
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from methods.base import CacheState
from methods.triattention import TriAttention, centred
from tests.methods.synthetic import SHAPES, Sequences, attention

LAYERS, BUFFER, BUDGET = 2, 8, 40


def complexes(x: Tensor) -> list[list[complex]]:
    """Rows [T D] as their rotating pairs of channels."""
    first, second = x.double().chunk(2, -1)
    return torch.complex(first, second).tolist()


def series(queries: Tensor, keys: Tensor, places: list[int], seen: int) -> Tensor:
    """Return the score of each key, before rotations; queries [T D], keys [K D]."""
    turns = (10000 ** (-torch.arange(0, keys.shape[1], 2).double() / keys.shape[1])).tolist()
    of_queries, scores = complexes(queries), []
    for key, place in zip(complexes(keys), places, strict=True):
        score = 0.0
        for number, turn in enumerate(turns):
            column = [row[number] for row in of_queries]
            centre, norm = sum(column) / len(column), sum(map(abs, column)) / len(column)
            angle = phase(centre * key[number].conjugate())
            waves = [cos((seen + 2**power - place) * turn + angle) for power in range(17)]
            score += abs(key[number]) * (abs(centre) * sum(waves) / 17 + norm - abs(centre))
        scores.append(score)
    return torch.tensor(scores)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [30, BUDGET + 5], ids=["the prompt stays", "a longer prompt"])
def test_what_stays_is_what_the_series_puts_first_on_average_over_the_layers(shape: Any, length: int) -> None:
    s, other = Sequences(shape, length + 22, layers=LAYERS), Sequences(shape, 24, layers=LAYERS)
    other.weight = s.weight
    prepared = {layer: centred(other.at(layer, 0, 24)) for layer in range(LAYERS)}
    request = s.request(BUDGET, prepared=prepared)
    layers: list[Any] = TriAttention(buffer=BUFFER).start(s.specs, CacheState(request))
    stored = [[list(range(length)) for _ in range(shape.groups)] for _ in range(shape.batch)]
    whole = length if length < BUDGET else 0

    def ranked(seen: int) -> list[list[list[int]]]:
        kept = []
        for b in range(shape.batch):
            kept.append([])
            for g in range(shape.groups):
                first, places, means = stored[b][g][:whole], stored[b][g][whole:], list[Tensor]()
                for layer in range(LAYERS):
                    group, heads = shape.heads // shape.groups, list[Tensor]()
                    for head in range(g * group, (g + 1) * group):
                        queries = other.project(layer, other.hidden[layer])[0, head]
                        score = series(queries, s.raw_k[layer][b, g, places], places, seen)
                        heads.append((score - score.mean()) / score.std(unbiased=False))
                    means.append(torch.stack(heads).amax(0))
                best = torch.stack(means).mean(0).topk(BUDGET - whole).indices.sort().values
                kept[b].append([*first, *(places[i] for i in best.tolist())])
        return kept

    s.seal(layers, 0, length)
    if not whole:
        stored = ranked(length)
    for position in range(length, s.length):
        if len(stored[0][0]) == BUDGET + BUFFER:
            stored = ranked(position)
        stored = [[[*head, position] for head in heads] for heads in stored]
        outs = s.decode(layers, position)
        assert [layer.stored_positions().tolist() for layer in layers] == [stored] * LAYERS
        for layer, out in enumerate(outs):
            q, k = s.q(layer)[:, :, position, None], s.k(layer)
            assert_close(out, attention(q, k, s.v[layer], stored, shape.dim**-0.5))


def test_a_prompt_as_long_as_the_budget_leaves_no_row_for_the_answer() -> None:
    s = Sequences(SHAPES[0], BUDGET + 20)
    prepared = {0: centred(s.at(0, 0, 24))}
    (layer,) = TriAttention(buffer=BUFFER).start(s.specs, CacheState(s.request(BUDGET, prepared=prepared)))
    s.seal([layer], 0, BUDGET)
    for position in range(BUDGET, BUDGET + BUFFER + 1):
        s.decode([layer], position)
    wanted = [*range(BUDGET), BUDGET + BUFFER]
    assert layer.stored_positions()[0, 0].tolist() == wanted  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["buffer", "calibration_tokens"])
def test_a_parameter_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        TriAttention(**{name: 0})
