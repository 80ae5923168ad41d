"""PQCache against loops: Lloyd's rounds, coded keys, the choice over a group, the number of rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from harness.engine.attach import attached
from kernels import ops
from kernels.dispatch import use_backend
from methods.layers import Layer
from methods.parts.kmeans_iterations import LENGTHS, Fit, polynomial
from methods.pqcache import PQCache, PQRead
from tests.fast import PQ
from tests.methods.synthetic import SHAPES, Sequences, Shape, attention
from tests.methods.test_oracle import sequences
from tests.tiny import prompt, tiny

METHOD = replace(PQ, m=4, b=5, iterations=4, tolerance=0.0, seed=5, sinks=3, recent_ratio=0.25)
PROMPT, STEPS, BUDGET = 83, 3, 23
SINKS, LOCAL, TOP = 3, 5, 15
MIDDLE = slice(SINKS, PROMPT - LOCAL)


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


def test_steps_by_pairs_of_codes_equal_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, and tensors lie on the CPU")
    monkeypatch.setattr("methods.pqcache.queues", lambda device: True)
    s = sequences(SHAPES[-1])
    (layer,) = s.start(replace(METHOD, m=2), BUDGET)
    s.seal([layer], 0, PROMPT)
    assert layer.reads.held.sum(-1).eq(PROMPT - SINKS - LOCAL).all()
    middle = s.k(0)[:, :, MIDDLE].double()
    coded = torch.stack([torch.stack([reconstructed(head, 2, 32) for head in heads]) for heads in middle])
    with use_backend("triton"):
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


PAPER = (4.86069848e-11, 2.52501805e-06, 5.10610107e-04)  # a Mistral layer's prefill on the authors' GPU
SLOW = Fit(*PAPER, few_1=2e-6, few_0=1e-3, one_1=5e-7, one_0=1e-4)
AUTO = replace(PQ, iterations="auto")


def test_the_papers_formula() -> None:
    """Mistral at 8192 tokens: 24 ms of prefill; 17.4 ms for 3 rounds and 4.2 ms for each further one."""
    prefill = PAPER[0] * 8192**2 + PAPER[1] * 8192 + PAPER[2]
    assert prefill == pytest.approx(24.5e-3, rel=0.01)
    few, each = 2e-6 * 8192 + 1e-3, 5e-7 * 8192 + 1e-4
    assert SLOW.iterations(8192) == int((prefill - few) / each + 3) == 4


def test_the_fit_finds_the_coefficients_it_is_made_of() -> None:
    seconds = [PAPER[0] * s**2 + PAPER[1] * s + PAPER[2] for s in LENGTHS]
    assert polynomial(LENGTHS, seconds, 2) == pytest.approx(PAPER, rel=1e-3)
    falling = polynomial(LENGTHS, [0.4, 0.3, 0.2, 0.1], 1)
    assert falling[0] == 0  # no machine clusters more tokens in less time
    assert falling[1] > 0


def limits(monkeypatch: pytest.MonkeyPatch, method: PQCache, **how: Any) -> list[int]:
    """How many rounds the layers of a 90-token prompt were allowed."""
    made: list[int] = []
    kmeans = ops.kmeans
    monkeypatch.setattr(ops, "kmeans", lambda x, i, count, tolerance: made.append(count) or kmeans(x, i, 2, tolerance))
    with attached(tiny("llama"), method, budget=0.4, **how) as kv, torch.inference_mode():
        made.clear()
        cache = kv.cache(capacity=100)
        kv.model(prompt(90), past_key_values=cache, use_cache=True)
        cache.seal()
    monkeypatch.setattr(ops, "kmeans", kmeans)
    return made


def test_a_fit_is_timed_once_and_serves_both_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    text = prompt(max(LENGTHS))
    first = limits(monkeypatch, AUTO, calibration=text)
    assert len(set(first)) == 1
    assert 3 <= first[0] <= 300

    def refuse(*arguments: object) -> None:
        raise AssertionError("timed again")

    monkeypatch.setattr("methods.pqcache.measure", refuse)
    assert limits(monkeypatch, AUTO, calibration=text, placement="host") == first
    with attached(tiny("llama"), AUTO, budget=0.2, calibration=text) as kv:
        elsewhere = replace(AUTO, **AUTO.measured(kv.prepared))
    assert limits(monkeypatch, elsewhere) == first  # no calibration text: nothing is timed
