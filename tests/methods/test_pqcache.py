"""PQCache against loops: Lloyd's rounds, coded keys, a softmax over the candidates alone, the sum over a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from methods.base import PaperBudget
from methods.layers import Layer
from methods.pqcache import PQCache, PQRead
from tests.fast import PQ
from tests.methods import parity
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
        assert positions is not None
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
        assert isinstance(layer.reads, PQRead)
        s.seal([layer], 0, 390)
        kinds[b] = layer.reads.codes.dtype
        assert int(layer.reads.codes.max()) < layer.reads.centroids.shape[3] == min(2**b, 390 - 3 - 9)
    assert kinds == {8: torch.uint8, 9: torch.int32}


@parity.sources
@pytest.mark.parametrize("repeated", [False, True], ids=["gqa", "mha"])
def test_scores_are_the_released_codes_over_the_same_centroids(
    source: Callable[..., Sequences], repeated: bool
) -> None:
    """A table of query parts times centroids, looked up by code and added up; the softmax over the candidates, summed
    over a group. The paper ranks before the softmax, which is the same where every query head has its own keys."""
    s, method = source(parity.PROMPT + 1, repeated=repeated), PQCache()
    layers = s.start(method, PaperBudget(parity.RHO, count=method.paper_tokens))
    s.seal(layers, 0, parity.PROMPT)
    for index, (layer, out) in enumerate(zip(layers, s.decode(layers, parity.PROMPT), strict=True)):
        assert isinstance(layer.reads, PQRead)
        q, k, _ = parity.step(s, index)
        centroids, codes = layer.reads.centroids.double(), layer.reads.codes.long()  # [B G m C d'], [B G M m]
        table = torch.einsum("bghid,bgicd->bghic", q.unflatten(3, (method.m, -1)), centroids)
        found = codes.mT.unsqueeze(2).expand(-1, -1, q.shape[2], -1, -1)
        logits = table.gather(4, found).sum(3)  # [B G g M]
        rebuilt = centroids.gather(3, codes.mT.unsqueeze(4).expand(-1, -1, -1, -1, centroids.shape[4]))
        keys = rebuilt.transpose(2, 3).flatten(3)  # [B G M D]
        assert_close(logits, q @ keys.mT)
        weights = (logits * s.shape.dim**-0.5).softmax(-1).sum(2)
        parity.assert_best(layer.reads.rows, weights, parity.HALF)
        if repeated:
            parity.assert_best(layer.reads.rows, logits.squeeze(2), parity.HALF)
        parity.assert_reads(out, s, index, layer.read_positions())
        _assert_nearest(k[:, :, 32 : parity.PROMPT - parity.HALF], centroids, codes)


def _assert_nearest(keys: Tensor, centroids: Tensor, codes: Tensor) -> None:
    """Every key's code names its nearest centroid, by the Euclidean distance, in each sub-vector."""
    parts = keys.unflatten(3, (centroids.shape[2], -1)).transpose(2, 3)  # [B G m M d']
    distances = torch.cdist(parts, centroids)
    coded = distances.gather(4, codes.mT.unsqueeze(4)).squeeze(4)
    assert bool((coded <= distances.amin(4) * (1 + 1e-5) + 1e-6).all())
