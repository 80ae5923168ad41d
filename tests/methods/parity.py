"""For holding a choice against the rule of a paper's released code, on random tensors and on a model's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.methods.recorded import Recorded
from tests.methods.synthetic import Sequences, Shape

PROMPT = 632  # 600 behind PQCache's 32 sinks; no whole number of Quest's pages
RHO = 0.2
HALF = 60  # of RHO behind the sinks


def random(length: int, repeated: bool = False) -> Sequences:
    """Query heads of a group differ in temperature."""
    made = Sequences(Shape(9, 9 if repeated else 3, 64), length, layers=3)
    made.weight.unflatten(2, (3, -1, 64))[:, :, :, 0] *= 4
    return made


def recorded(length: int, repeated: bool = False) -> Sequences:
    return Recorded(length, layers=[0, 14, 29], repeated=repeated)


sources = pytest.mark.parametrize(
    "source", [random, pytest.param(recorded, marks=[pytest.mark.model, pytest.mark.slow])]
)


def step(s: Sequences, layer: int, position: int = PROMPT) -> tuple[Tensor, Tensor, Tensor]:
    """What a decode step sees, in fp64: q [B G g D], and k, v [B G N D] with the current token."""
    q = s.q(layer)[:, :, position].unflatten(1, (s.shape.groups, -1))
    return q.double(), s.k(layer)[:, :, : position + 1].double(), s.v[layer][:, :, : position + 1].double()


def assert_best(chosen: Tensor, scores: Tensor, count: int) -> None:
    """`chosen` [... K] are the `count` best of `scores` [... S], as a set; any of those equal up to rounding."""
    assert chosen.shape[-1] == count
    taken = torch.zeros(scores.shape).scatter_(-1, chosen, 1.0).bool()
    assert bool((taken.sum(-1) == count).all()), "a token was chosen twice"
    least = scores.topk(count).values[..., -1:]
    slack = 1e-5 * scores.abs().amax(-1, keepdim=True)
    assert bool((scores[taken] >= (least - slack).expand_as(scores)[taken]).all())
    assert bool(taken[scores > least + slack].all())


def assert_reads(out: Tensor, s: Sequences, layer: int, rows: Tensor, position: int = PROMPT) -> None:
    """`out` [B H 1 D] is exact attention over the prompt tokens `rows` [B G|H K] and all tokens since."""
    q, k, v = step(s, layer, position)
    heads = s.shape.heads
    rows = rows.repeat_interleave(heads // rows.shape[1], 1).unflatten(1, (s.shape.groups, -1))
    logits = (q @ k.mT) * s.shape.dim**-0.5
    kept = torch.zeros(logits.shape).scatter_(-1, rows, 1.0).bool()
    kept[..., PROMPT:] = True
    wanted = logits.masked_fill(~kept, float("-inf")).softmax(-1) @ v
    torch.testing.assert_close(out[:, :, 0].double(), wanted.flatten(1, 2), atol=2e-5, rtol=1e-4)
