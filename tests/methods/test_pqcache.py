"""PQCache against loops: Lloyd's rounds, coded keys, a softmax over the candidates alone, the sum over a group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from methods.layers import Layer
from methods.pqcache import PQRead
from tests.fast import PQ
from tests.methods.synthetic import SHAPES, Sequences, Shape, attention

METHOD = replace(PQ, m=4, b=5, iterations=4, tolerance=0.0, seed=5, sinks=3, recent_ratio=0.25)
PROMPT, STEPS, BUDGET = 83, 3, 23
SINKS, LOCAL, TOP = 3, 5, 15
MIDDLE = slice(SINKS, PROMPT - LOCAL)


def sequences(shape: Shape) -> Sequences:
    """The first query head of every group is far larger than the others, and the window's last key than the rest."""
    made = Sequences(shape, PROMPT + STEPS).sharpened(4)
    made.raw_k[..., PROMPT - 1, :] *= 6
    return made


def lloyd(points: Tensor, first: Tensor, rounds: int) -> tuple[Tensor, list[int]]:
    """points [N d] -> centroids [C d] and each point's."""
    centroids = points[first].clone()
    for _ in range(rounds):
        near = [int((centroids - x).square().sum(1).argmin()) for x in points]
        for c in range(len(centroids)):
            mine = [x for x, code in zip(points, near, strict=True) if code == c]
            if mine:
                centroids[c] = torch.stack(mine).mean(0)
    return centroids, [int((centroids - x).square().sum(1).argmin()) for x in points]


def reconstructed(keys: Tensor, m: int, clusters: int) -> Tensor:
    """Every key [N D] with its sub-vectors' centroids in place of them."""
    first = torch.randperm(len(keys), generator=torch.Generator().manual_seed(METHOD.seed))[:clusters]
    parts = [lloyd(part, first, METHOD.iterations) for part in keys.chunk(m, 1)]
    return torch.cat([centroids[codes] for centroids, codes in parts], 1)


def choice(s: Sequences, keys: Tensor, position: int) -> list[list[list[int]]]:
    """Prompt tokens read at `position` where the middle's keys look like `keys` [B G M D], ascending."""
    group = s.shape.heads // s.shape.groups
    read: list[list[list[int]]] = []
    for b in range(s.shape.batch):
        read.append([])
        for g in range(s.shape.groups):
            q = s.q(0)[b, g * group : (g + 1) * group, position].double()
            weights = (q @ keys[b, g].T * s.shape.dim**-0.5).softmax(1).sum(0)
            best = (weights.argsort(descending=True)[:TOP] + SINKS).sort().values.tolist()
            read[-1].append([*range(SINKS), *best, *range(PROMPT - LOCAL, PROMPT)])
    return read


def assert_steps(s: Sequences, keys: Tensor, layer: Layer, steps: int = STEPS) -> None:
    for position in range(PROMPT, PROMPT + steps):
        (out,) = s.decode([layer], position)
        read = choice(s, keys, position)
        positions = layer.read_positions()
        assert positions.sort(-1).values.tolist() == read
        whole = [[[*head, *range(PROMPT, position + 1)] for head in sequence] for sequence in read]
        wanted = attention(s.q(0)[:, :, position : position + 1], s.k(0), s.v[0], whole, s.shape.dim**-0.5)
        assert_close(out, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("placement", ["device", "host"])
def test_step_equals_loops(shape: Shape, placement: str) -> None:
    s = sequences(shape)
    (layer,) = s.start(METHOD, BUDGET, placement=placement)
    assert isinstance(layer.reads, PQRead)
    s.seal([layer], 0, PROMPT)
    middle = s.k(0)[:, :, MIDDLE].double()
    coded = torch.stack([torch.stack([reconstructed(head, 4, 32) for head in heads]) for heads in middle])
    assert_steps(s, coded, layer)


def test_codes_take_a_byte_up_to_256_centroids() -> None:
    s = Sequences(Shape(2, 1, 64), 400)
    kinds = {}
    for b in (8, 9):
        (layer,) = s.start(replace(METHOD, b=b), 40)
        s.seal([layer], 0, 390)
        kinds[b] = layer.reads.codes.dtype
        assert int(layer.reads.codes.max()) < layer.reads.centroids.shape[3] == min(2**b, 390 - 3 - 9)
    assert kinds == {8: torch.uint8, 9: torch.int32}
