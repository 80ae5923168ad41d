"""ShadowKV against its formulas, written out in loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kernels.rope import rotate
from methods.layers import Layer
from methods.shadowkv import ChunkPlan, ShadowKV, ShadowRead
from tests.methods.synthetic import SHAPES, Sequences, Shape, attention

METHOD = ShadowKV(chunk=4, rank=0.25, local_chunks=2, outlier_share=0.3, solver="gram_fp64", hit_cache=True)
PROMPT, STEPS, BUDGET = 71, 6, 38  # 17 chunks and 3 tokens; 15 candidates, 11 local tokens, 6 chunks to spend


def sealed(
    text: Sequences, method: ShadowKV = METHOD, budget: float = BUDGET, prompt: int = PROMPT, **more: object
) -> Layer:
    layers = text.start(method, budget, **more)
    text.seal(layers, 0, prompt)
    assert isinstance(layers[0].reads, ShadowRead)
    return layers[0]


def rebuilt_keys(text: Sequences, rank: int, prompt: int = PROMPT, layer: int = 0) -> Tensor:
    """The rotated keys after a rank-r approximation of all heads' unrotated keys together."""
    raw = text.raw_k[layer][:, :, :prompt]
    joint = raw.transpose(1, 2).flatten(2).double()
    u, s, vt = torch.linalg.svd(joint, full_matrices=False)
    low = (u[..., :rank] * s[:, None, :rank]) @ vt[:, :rank]
    keys = low.unflatten(2, (text.shape.groups, -1)).transpose(1, 2).float()
    return rotate(keys, text.cos[:, :prompt], text.sin[:, :prompt])


SMALL = ChunkPlan(candidates=15, local=11, outliers=1, top=5)


def reference_sets(
    text: Sequences, q: Tensor, b: int, g: int, plan: ChunkPlan = SMALL, size: int = 4, layer: int = 0, width: int = 0
) -> tuple[list[int], list[int]]:
    """Outlier and selected chunks of one KV head, by the paper's rules. Logits are divided by the root of `width`, the
    head size where it is 0."""
    keys, count = text.k(layer)[b, g], plan.candidates
    chunks = [keys[size * n : size * n + size] for n in range(count)]
    means = [chunk.mean(0) for chunk in chunks]
    lowest = [
        min(float(cosine_similarity(key, mean, dim=0)) for key in chunk)
        for chunk, mean in zip(chunks, means, strict=True)
    ]
    outliers = sorted(range(count), key=lambda n: lowest[n])[: plan.outliers]
    rest = [n for n in range(count) if n not in outliers]
    group = text.shape.heads // text.shape.groups
    landmarks = torch.stack([means[n] for n in rest])
    scale = (width or text.shape.dim) ** -0.5
    weights = [(landmarks @ q[b, h, 0] * scale).softmax(0) for h in range(g * group, (g + 1) * group)]
    best = torch.stack(weights).amax(0)
    return outliers, sorted(rest, key=lambda n: -float(best[rest.index(n)]))[: plan.top]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_is_the_formulas(shape: Shape) -> None:
    text = Sequences(shape, PROMPT + STEPS)
    layer = sealed(text)
    approximate = rebuilt_keys(text, round(0.25 * shape.groups * shape.dim))
    for t in range(PROMPT, PROMPT + STEPS):
        x = text.at(0, t, t + 1)
        out = layer.decode(x)
        keys, positions = text.k(0).clone(), []
        for b in range(shape.batch):
            positions.append([])
            for g in range(shape.groups):
                outliers, selected = reference_sets(text, x.q, b, g)
                chosen = [4 * n + i for n in selected for i in range(4)]
                keys[b, g, chosen] = approximate[b, g, chosen]
                exact = [4 * n + i for n in outliers for i in range(4)]
                positions[b].append([*exact, *chosen, *range(60, t + 1)])
                read = layer.read_positions()
                assert sorted(read[b, g].tolist()) == sorted(p for p in positions[b][g] if p < PROMPT)
        expected = attention(x.q, keys, text.v[0], positions, shape.dim**-0.5)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
        assert layer.attended == (11 + 4 + 20, t + 1 - PROMPT)


def test_hit_cache_moves_less_and_changes_nothing() -> None:
    text = Sequences(SHAPES[1], PROMPT + STEPS)
    text.hidden[0, :, PROMPT:] = text.hidden[0, :, PROMPT : PROMPT + 1]  # similar queries, many hits
    moved, outs, hits = {}, {}, {}
    for cached in (True, False):
        layer = sealed(text, replace(METHOD, hit_cache=cached), placement="host")
        before = layer.cache.traffic.to_device_bytes
        outs[cached] = torch.stack([layer.decode(text.at(0, t, t + 1)) for t in range(PROMPT, PROMPT + STEPS)])
        moved[cached] = layer.cache.traffic.to_device_bytes - before
        hits[cached] = layer.cache.traffic.looked_up, layer.cache.traffic.found
    torch.testing.assert_close(outs[True], outs[False], atol=1e-5, rtol=1e-4)
    chunk_bytes = 4 * text.shape.dim * 4 * text.shape.groups * text.shape.batch
    assert moved[False] == STEPS * 5 * chunk_bytes  # values of five chunks, and no keys
    assert moved[True] < moved[False]
    assert hits[False] == (0, 0)


def test_the_hit_cache_counts_the_chunks_that_it_had() -> None:
    """Against sets of what each head chose in this step and in the one before."""
    text = Sequences(SHAPES[1], PROMPT + STEPS)
    layer = sealed(text, placement="host")
    had, before = 0, None
    for t in range(PROMPT, PROMPT + STEPS):
        layer.decode(text.at(0, t, t + 1))
        chosen = [set(chunks) for chunks in layer.reads.rows.flatten(0, 1).tolist()]
        had += sum(len(now & last) for now, last in zip(chosen, before or [], strict=before is not None))
        before = chosen
    traffic = layer.cache.traffic
    assert traffic.looked_up == STEPS * 5 * text.shape.groups * text.shape.batch
    assert traffic.found == had > 0


def test_a_further_turn_keeps_outliers_and_local_chunks_exact() -> None:
    text = Sequences(SHAPES[1], PROMPT + 5)
    layer = sealed(text, replace(METHOD, outlier_share=0.6))
    outliers = torch.zeros(2, 2, 15, dtype=torch.bool).scatter(2, layer.reads.outliers, True)
    assert outliers.sum(2).eq(3).all()
    layer.absorb(text.at(0, PROMPT, PROMPT + 5))
    near = torch.isclose(layer.store.k, text.k(0), atol=1e-5).all(-1)
    assert torch.equal(near[..., :60], outliers.repeat_interleave(4, 2))
    assert near[..., 60:].all()
    torch.testing.assert_close(layer.store.v, text.v[0])


def test_budget_is_the_papers_at_its_size() -> None:
    paper = ShadowKV(chunk=8, rank=160, local_chunks=4, outlier_share=0.158, solver="gram_fp64", hit_cache=True)
    assert paper.plan(2464 + 7, 131072 + 7) == (16384 - 4, 39, 48, 256)
    assert paper.rank_of(131072, 1024) == 160
    for sealed_tokens in range(60, 400):  # no plan asks for more chunks than there are, or none
        for budget in range(paper.smallest_budget, sealed_tokens):
            plan = paper.plan(budget, sealed_tokens)
            assert plan.top >= 1
            assert plan.outliers + plan.top <= plan.candidates
            assert plan.local + 8 * (plan.outliers + plan.top) <= budget
