"""Oracle against loops: the exact softmax over all stored tokens, summed over a group, ranks the middle ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close

from methods.base import PaperBudget
from methods.oracle import Oracle, OracleRead
from tests.methods import parity
from tests.methods.synthetic import SHAPES, Sequences, Shape, attention

METHOD = Oracle(sinks=3, recent_ratio=0.25)
PROMPT, STEPS, BUDGET = 83, 3, 23
SINKS, LOCAL, TOP = 3, 5, 15


def sequences(shape: Shape) -> Sequences:
    """Query heads of a group differ in temperature, and one head's weight lies on the window's last key."""
    made = Sequences(shape, PROMPT + STEPS).sharpened(4)
    made.raw_k[..., PROMPT - 1, :] *= 6
    return made


def choice(s: Sequences, position: int, *, over_all: bool = True) -> list[list[list[int]]]:
    group, k = s.shape.heads // s.shape.groups, s.k(0)[:, :, : position + 1].double()
    middle = slice(SINKS, PROMPT - LOCAL)
    read: list[list[list[int]]] = []
    for b in range(s.shape.batch):
        read.append([])
        for g in range(s.shape.groups):
            total = torch.zeros(PROMPT - LOCAL - SINKS, dtype=torch.float64)
            for h in range(g * group, (g + 1) * group):
                logits = k[b, g] @ s.q(0)[b, h, position].double() * s.shape.dim**-0.5
                total += logits.softmax(0)[middle] if over_all else logits[middle].softmax(0)
            best = (total.argsort(descending=True)[:TOP] + SINKS).sort().values.tolist()
            read[-1].append([*range(SINKS), *best, *range(PROMPT - LOCAL, PROMPT)])
    return read


@pytest.mark.parametrize("shape", SHAPES)
def test_step_equals_loops(shape: Shape) -> None:
    s = sequences(shape)
    layers = s.start(METHOD, BUDGET)
    s.seal(layers, 0, PROMPT)
    for position in range(PROMPT, s.length):
        (out,) = s.decode(layers, position)
        positions, read = layers[0].read_positions(), choice(s, position)
        assert positions is not None
        assert positions.sort(-1).values.tolist() == read
        whole = [[[*head, *range(PROMPT, position + 1)] for head in sequence] for sequence in read]
        wanted = attention(s.q(0)[:, :, position : position + 1], s.k(0), s.v[0], whole, shape.dim**-0.5)
        assert_close(out, wanted, atol=1e-5, rtol=1e-5)


@parity.sources
def test_the_choice_is_the_released_codes(source: Callable[[int], Sequences]) -> None:
    """Softmax over all cached tokens, summed over a group, ranks those between sinks and window."""
    s, method = source(parity.PROMPT + 1), Oracle()
    layers = s.start(method, PaperBudget(parity.RHO, count=method.paper_tokens))
    s.seal(layers, 0, parity.PROMPT)
    for index, (layer, out) in enumerate(zip(layers, s.decode(layers, parity.PROMPT), strict=True)):
        assert isinstance(layer.reads, OracleRead)
        q, k, _ = parity.step(s, index)
        weights = (q @ k.mT * s.shape.dim**-0.5).softmax(-1).sum(2)
        parity.assert_best(layer.reads.rows, weights[..., 32 : parity.PROMPT - parity.HALF], parity.HALF)
        positions = layer.read_positions()
        assert {*range(32), *range(parity.PROMPT - parity.HALF, parity.PROMPT)} <= set(positions[0, 0].tolist())
        parity.assert_reads(out, s, index, positions)
