"""Quest against loops: bounds, the choice of pages, the short last page, and who shares a choice."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.testing import assert_close

from methods.quest import Quest
from tests.methods.synthetic import SHAPES, Sequences, Shape, attention

METHOD = Quest(page_size=4, min_pages=2, dense_layers=(), select_per="query_head", last_page=True)
STEPS, BUDGET = 3, 26  # 6 pages and a bit


def _sequences(shape: Shape, prompt: int) -> Sequences:
    """Query heads of a group differ in size; one channel of the keys decides a lot, so that pages stand out."""
    sequences = Sequences(shape, prompt + STEPS).sharpened(4)
    sequences.raw_k[..., -1] *= 5
    sequences.raw_k[:, :, :, prompt - prompt % 4 : prompt] *= 1.4  # some heads choose the short last page
    return sequences


def _pages(s: Sequences, method: Quest, prompt: int, position: int) -> list[list[list[int]]]:
    """Chosen tokens per sequence and query head, by loops over pages and channels."""
    shape, size, group = s.shape, method.page_size, s.shape.heads // s.shape.groups
    pages = [range(a, min(a + size, prompt)) for a in range(0, prompt, size)]
    q, k = s.q(0)[:, :, position].double(), s.k(0).double()
    chosen = []
    for b in range(shape.batch):
        scores = torch.zeros(shape.heads, len(pages), dtype=torch.float64)
        for h, (p, page) in product(range(shape.heads), enumerate(pages)):
            keys = k[b, h // group, list(page)]
            scores[h, p] = sum(
                max(c * upper, c * lower)
                for c, upper, lower in zip(q[b, h].tolist(), keys.amax(0).tolist(), keys.amin(0).tolist(), strict=True)
            )
        if method.select_per == "kv_head":
            scores = scores.unflatten(0, (-1, group)).amax(1).repeat_interleave(group, 0)
        if method.last_page:
            scores[:, -1] = torch.inf
        best = scores.argsort(-1, descending=True)[:, : BUDGET // size]
        chosen.append([sorted(j for p in head for j in pages[p]) for head in best.tolist()])
    return chosen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prompt", [80, 83], ids=["whole", "partial"])
@pytest.mark.parametrize("select_per", ["query_head", "kv_head"])
@pytest.mark.parametrize("last_page", [True, False], ids=["last", "any"])
def test_step_equals_loops(shape: Shape, prompt: int, select_per: str, last_page: bool) -> None:
    s, method = _sequences(shape, prompt), replace(METHOD, select_per=select_per, last_page=last_page)
    group = shape.heads // shape.groups
    layers = s.start(method, BUDGET)
    s.seal(layers, 0, prompt)
    k, v = (x.repeat_interleave(group, 1) for x in (s.k(0), s.v[0]))
    for position in range(prompt, s.length):
        (out,) = s.decode(layers, position)
        chosen = _pages(s, method, prompt, position)
        read = [[[*head, *range(prompt, position + 1)] for head in sequence] for sequence in chosen]
        assert_close(out, attention(s.q(0)[:, :, position, None], k, v, read, shape.dim**-0.5), atol=1e-5, rtol=1e-5)
        counts = [len(head) for sequence in chosen for head in sequence]
        assert max(counts) <= BUDGET
        assert layers[0].attended.prompt == pytest.approx(sum(counts) / len(counts))
        positions = layers[0].read_positions()
        for b, i in product(range(shape.batch), range(shape.groups)):
            union = {j for head in chosen[b][i * group : i * group + group] for j in head}
            assert sorted(j for j in positions[b, i].tolist() if j >= 0) == sorted(union)
    assert layers[0].attended.generated == STEPS


@pytest.mark.parametrize("prompt", [80, 83], ids=["whole", "partial"])
@pytest.mark.parametrize("last_page", [True, False], ids=["last", "any"])
def test_what_query_heads_share_moves_once(prompt: int, last_page: bool) -> None:
    s, method = _sequences(SHAPES[1], prompt), replace(METHOD, last_page=last_page)
    here, away = (s.start(method, BUDGET, placement=placement) for placement in ("device", "host"))
    s.seal(here, 0, prompt)
    s.seal(away, 0, prompt)
    traffic, row_bytes = away[0].cache.traffic, 2 * SHAPES[1].dim * 4
    for position in range(prompt, s.length):
        before = traffic.settle().to_device_bytes
        (wanted,), (out,) = s.decode(here, position), s.decode(away, position)
        assert_close(out, wanted)
        chosen, group = _pages(s, method, prompt, position), SHAPES[1].heads // SHAPES[1].groups
        heads = [one[i : i + group] for one in chosen for i in range(0, len(one), group)]
        unions = [{j for head in group for j in head} for group in heads]
        assert traffic.settle().to_device_bytes - before == row_bytes * sum(map(len, unions))
        assert sum(map(len, unions)) < sum(len(head) for group in heads for head in group)
