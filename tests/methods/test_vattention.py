"""vAttention against loops, and its bound on the error on real steps."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from statistics import NormalDist
from typing import Any

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor
from torch.testing import assert_close

from harness import Engine, attached
from kernels.dispatch import use_backend
from methods.base import AttnInput
from methods.vattention import VAttention
from tests.batches import together
from tests.methods.recorded import Recorded
from tests.methods.synthetic import SHAPES, Sequences, Shape
from tests.tape import Tape
from tests.tiny import prompt, tiny

METHOD = VAttention(epsilon=0.25, delta=0.2, sinks=3, window=5, top_ratio=0.25, base_ratio=0.08, seed=9)
PROMPT, STEPS, BUDGET = 83, 4, 40
MIDDLE, TOP, MOST, LEAST = PROMPT - 8, 8, 24, 6
MASK = (1 << 64) - 1


def mixed(x: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> shift) * factor & MASK
    return x ^ x >> 31


def draws(position: int, group: int) -> list[int]:
    """Of layer 0."""
    step = 0x9E3779B97F4A7C15
    stream = mixed(mixed(9 * 0xBF58476D1CE4E5B9 & MASK) + position * step & MASK)
    numbers = [mixed(stream + (group * 2**32 + place) * step & MASK) for place in range(1, MOST + 1)]
    return [(number >> 32 & 2**31 - 1) * MIDDLE >> 31 for number in numbers]


def weighed(weights: Tensor, drawn: list[int]) -> tuple[dict[int, float], bool]:
    """The tokens of the middle that query heads with these softmax weights [heads S] read together, and how often each
    counts; and whether they asked for more draws than the budget allows."""
    middle = weights[:, 3 : PROMPT - 5]
    best = middle.sum(0).argsort(descending=True)[:TOP].tolist()
    sizes = []
    for head, own in zip(weights, middle, strict=True):
        known = head.sum() - own.sum() + own[best].sum()
        base = torch.stack([own[token] * (token not in best) for token in drawn[:LEAST]])
        total = (known + MIDDLE * base.mean()).item()
        asked = (NormalDist().inv_cdf(0.9) * MIDDLE * base.std().item() / (0.25 * total)) ** 2
        sizes.append(max(LEAST, ceil(asked)))
    size = min(max(sizes), MOST)
    sample = [token for token in drawn[:size] if token not in best]
    counts = {token: sample.count(token) * MIDDLE / size for token in sample}
    return dict.fromkeys(best, 1.0) | counts, max(sizes) > MOST


@pytest.mark.parametrize("select_per", ["query_head", "kv_head"])
@pytest.mark.parametrize("shape", SHAPES)
def test_step_equals_loops(shape: Shape, select_per: str) -> None:
    s, method, seen = Sequences(shape, PROMPT + STEPS).sharpened(3), replace(METHOD, select_per=select_per), set()
    (layer,) = layers = s.start(method, BUDGET)
    s.seal(layers, 0, PROMPT)
    group = shape.heads // shape.groups
    share = group if select_per == "kv_head" else 1
    capped = list[bool]()
    for position in range(PROMPT, s.length):
        (out,) = s.decode(layers, position)
        selected = layer.selected_positions()
        assert selected is not None
        counts = []
        for b in range(shape.batch):
            for first in range(0, shape.heads, share):
                kv, heads = first // group, slice(first, first + share)
                k, v = (x[b, kv, : position + 1].double() for x in (s.k(0), s.v[0]))
                weights = (s.q(0)[b, heads, position].double() @ k.T * shape.dim**-0.5).softmax(-1)
                read, short = weighed(weights, draws(position + 1, kv))
                capped.append(short)
                fixed = [*range(3), *range(PROMPT - 5, PROMPT)]
                own = sorted(token for token in selected[b, first // share].tolist() if token >= 0)
                assert own == sorted([*fixed, *(token + 3 for token in read)])
                times = torch.ones(position + 1, dtype=torch.float64)
                times[3 : PROMPT - 5] = 0
                times[[token + 3 for token in read]] = torch.tensor(list(read.values()), dtype=torch.float64)
                wanted = (weights * times / (weights * times).sum(-1, keepdim=True)) @ v
                assert_close(out[b, heads, 0].double(), wanted, atol=1e-5, rtol=1e-5)
                counts.append(len(own))
        seen |= set(counts)
        assert layer.attended.prompt == pytest.approx(sum(counts) / len(counts))
    assert len(seen) > 2  # samples differ in size
    traffic = layer.cache.traffic.settle()
    assert (traffic.samples, traffic.capped) == (len(capped), sum(capped))


@pytest.mark.tokens
def test_samples_that_the_budget_cuts_short_are_counted_in_each_place_in_batches_and_captured() -> None:
    ids = [prompt(182, seed=seed) for seed in range(2)]
    both, method, shares = torch.cat(ids), replace(METHOD, epsilon=0.05), list[float]()
    for placement, captured in (("device", False), ("host", False), ("device", True), ("host", True)):
        at: Any = placement
        with use_backend("torch"), attached(tiny("llama"), method, budget=0.3, placement=at) as kv:
            made = Engine(kv, graphs=Tape() if captured else None).generate(both, max_new_tokens=8)
            assert (made.capture_s is not None) == captured
            shares.append(made.measured["capped_share"])
            if captured:
                continue
            alone = [Engine(kv).generate(one, max_new_tokens=8).measured["capped_share"] for one in ids]
            assert [answer.measured["capped_share"] for answer in together(Engine(kv), ids, 8)] == alone
            shares.append(sum(alone) / 2)
    assert 0 < shares[0] < 1
    assert shares == pytest.approx(shares[:1] * 6)


def test_epsilon_and_delta_decide_what_is_read_from_a_sample_of_the_prompt_on() -> None:
    """At the defaults' base sample of 2 % of the prompt; half of the largest sample left little to decide."""
    s, read = Sequences(Shape(9, 3, 64), 1501), []
    for error in (0.05, 0.1, 0.2):
        layers = s.start(VAttention(epsilon=error, delta=error), 600)
        s.seal(layers, 0, 1500)
        s.decode(layers, 1500)
        read.append(layers[0].attended.prompt)
    assert read[0] > read[1] > read[2]


@torch.inference_mode()
def test_the_denominator_s_error_is_within_the_bound_on_real_steps() -> None:
    """500 steps in each of two layers of the embedded model over a text, one query head of each: no more than a share
    `delta` of them is off by more than `epsilon`, as far as 1,000 steps can tell; with a quarter of the quantile it is
    20 %."""
    prompt, s, epsilon, delta = 500, Recorded(1000, [0, 8]), 0.05, 0.05
    method = VAttention(epsilon=epsilon, delta=delta, sinks=4, window=16, top_ratio=0.05, base_ratio=0.05)
    layers = s.start(method, prompt - 10)
    s.seal(layers, 0, prompt)
    errors, read = [], []
    for number, layer in enumerate(layers):
        q, k, whole = s.q(number), s.k(number), s.at(number, 0, s.length)
        for position in range(prompt, s.length):
            own = slice(position, position + 1)
            parts = (x[:, :, own] for x in (q, k, s.v[number]))
            x = AttnInput(*parts, s.cos[:, own], s.sin[:, own], whole.hidden[:, own], position)
            layer.decode(x)
            head = position % s.shape.heads
            reads = layer.reads  # type: ignore[attr-defined]
            keys = k[0, head // (s.shape.heads // s.shape.groups), : position + 1].double()
            weights = (keys @ q[0, head, position].double() * layer.spec.scale).softmax(0)
            middle, added = weights[4 : prompt - 16], reads.weights.log_weights[0, head].double().exp()
            errors.append((1 - middle.sum() + middle[reads.rows[0, head]] @ added - 1).item())
            read.append((added > 0).sum().item())
    worse = sum(abs(error) > epsilon for error in errors)
    assert len(errors) == 1000
    assert binomtest(worse, 1000).proportion_ci(0.95).low <= delta
    assert abs(sum(errors) / 1000) < 0.1 * epsilon
    assert sum(read) / 1000 < 0.4 * (prompt - 30)  # so much is chosen at most


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"epsilon": 0.0}, "between 0 and 1"), ({"window": -1}, "numbers of tokens"), ({"select_per": "x"}, "kv_head")],
)
def test_wrong_parameters_are_refused(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        VAttention(**wrong)  # type: ignore[arg-type]
