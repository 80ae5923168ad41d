"""Oracle against loops: the exact softmax over all stored tokens, summed over a group, ranks the middle ones."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from methods.oracle import Oracle
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
        assert positions.sort(-1).values.tolist() == read
        whole = [[[*head, *range(PROMPT, position + 1)] for head in sequence] for sequence in read]
        wanted = attention(s.q(0)[:, :, position : position + 1], s.k(0), s.v[0], whole, shape.dim**-0.5)
        assert_close(out, wanted, atol=1e-5, rtol=1e-5)
