"""Budgets by mass (Twilight): of what a method chose, a step reads as many tokens as carry a share of the weights that
keys in 4 bits estimate. Against loops, and the same wherever rows lie, in batches and captured."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from harness import Engine, attached
from kernels import ops
from kernels.dispatch import use_backend
from methods.base import Budget, BudgetError, CacheState, Method
from methods.full import Full
from methods.layers import Layer
from methods.oracle import Oracle
from methods.pqcache import PQCache
from methods.quest import Quest
from methods.sparq import SparQ
from tests.harness.engine import test_slots
from tests.methods import test_costs as measuring
from tests.methods.synthetic import SHAPES, Sequences, Shape
from tests.tape import Tape
from tests.tiny import prompt, tiny

PROMPT, STEPS = 83, 3
METHODS: dict[str, Method] = {
    "oracle": Oracle(sinks=3, recent_ratio=0.25),
    "pqcache": PQCache(sinks=3, recent_ratio=0.25, b=4),
    "quest": Quest(page_size=4, min_pages=1, dense_layers=()),
    "quest-kv-head": Quest(page_size=4, min_pages=1, dense_layers=(), select_per="kv_head"),
    "quest-uneven": Quest(page_size=4, min_pages=1, dense_layers=(), last_page=False),
}
named = pytest.mark.parametrize("name", METHODS)


def in_4_bits(key: Tensor) -> Tensor:
    """One key [D] with an offset and a step of its own; fp16 rounds both outwards, so they are found by search."""
    least = key.min().half()
    while least.float() > key.min():
        least = torch.nextafter(least, torch.tensor(-torch.inf, dtype=torch.float16))
    step = ((key.max() - least.float()) / 15).half()
    while step.float() * 15 < key.max() - least.float():
        step = torch.nextafter(step, torch.tensor(torch.inf, dtype=torch.float16))
    return ((key - least.float()) / step.float()).round().clamp(0, 15) * step.float() + least.float()


@pytest.mark.parametrize("backend", ops.carrying.targets)
def test_a_share_is_carried_by_the_fewest_tokens_of_each_head(backend: str) -> None:
    """Against loops in fp64, with long tails, candidates that are missing, and equal weights. In Triton, weights that
    differ by less than 0.05 % count as equal."""
    if backend == "triton":
        pytest.importorskip("triton")
    draw, many = torch.Generator().manual_seed(0), 1 if backend == "triton" else 2
    for spread in (0.0, 1.0, 30.0):
        logits = spread * torch.randn(many, many, 3, 600, generator=draw)
        always = torch.randn(many, many, 3, generator=draw)
        logits[:, :, :, ::7] = -torch.inf
        for mass in (0.001, 0.6, 0.999, 0.9999999, 1.0):
            wanted = torch.zeros(many, many, 600, dtype=torch.bool)
            for b, c, head in itertools.product(range(many), range(many), range(3)):
                weights = torch.cat([always[b, c, head, None], logits[b, c, head]]).double().softmax(0)[1:].tolist()
                left, ranked = 0.0, sorted((weights[token], -token) for token in range(600) if token % 7)
                for weight, token in ranked:
                    left += weight
                    wanted[b, c, -token] |= mass == 1 or left > 1 - mass
            with use_backend(backend):
                other = (ops.carrying(logits, logits, always.unsqueeze(3), mass, 1.0) == 0) ^ wanted
            assert other.sum() <= (4 if backend == "triton" and spread else 0)
    nothing, few = torch.full((1, 1, 1, 1), -torch.inf), torch.tensor([[[[900.0, 60, -60]]]])
    with use_backend(backend):
        assert ops.carrying(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 1), nothing, 0.5, 1.0).tolist() == [
            [[0, 0, -torch.inf, -torch.inf]]
        ]
        assert not ops.carrying(few, few, nothing, 1.0, 1.0).any()


@named
def test_a_sink_logit_carries_what_it_weighs(name: str) -> None:
    s = Sequences(SHAPES[1], PROMPT + 1)
    heavy = [replace(spec, sink_logits=torch.full((6,), 60.0)) for spec in s.specs]
    (layer,) = METHODS[name].start(heavy, CacheState(s.request(Budget(35, mass=0.6))))
    s.seal([layer], 0, PROMPT)
    s.decode([layer], PROMPT)
    assert layer.attended.prompt == (11 if name in ("oracle", "pqcache") else 0)


@named
@pytest.mark.parametrize("budget", [35, 200], ids=["some", "covering"])
@pytest.mark.parametrize("shape", SHAPES)
def test_step_equals_loops(name: str, budget: int, shape: Shape) -> None:
    """A run without `mass` says the candidates, and all are where the budget covers the prompt; as many are read as
    carry the share."""
    s, mass = Sequences(shape, PROMPT + STEPS).sharpened(4), 0.6
    (wide,), (layer,) = s.start(METHODS[name], budget), s.start(METHODS[name], Budget(budget, mass=mass))
    assert isinstance(layer, Layer)
    for one in (wide, layer):
        s.seal([one], 0, PROMPT)
    first = 3 if name in ("oracle", "pqcache") else 0
    window = (min(budget, PROMPT) - first) // 4
    always = {*range(3), *range(PROMPT - window, PROMPT)} if first else set()
    group, fewer = shape.heads // shape.groups, 0
    for position in range(PROMPT, s.length):
        s.decode([wide], position)
        (out,) = s.decode([layer], position)
        candidates, selected = wide.selected_positions(), layer.selected_positions()
        assert selected is not None
        assert (candidates is None) == (budget > PROMPT)
        if candidates is None:
            candidates = torch.arange(PROMPT).expand(*selected.shape[:2], -1)
        share = shape.heads // selected.shape[1]  # query heads of a list
        counts = []
        for b in range(shape.batch):
            for number, (chosen, read) in enumerate(zip(candidates[b].tolist(), selected[b].tolist(), strict=True)):
                kv, heads = number * share // group, range(number * share, (number + 1) * share)
                k, v = (x[b, kv, : position + 1] for x in (s.k(0), s.v[0]))
                of_choice = [token for token in chosen if token >= 0 and token not in always]
                wanted: set[int] = set()
                for head in heads:
                    q, keys = s.q(0)[b, head, position], k.clone()
                    for token in of_choice:
                        keys[token] = in_4_bits(k[token])
                    may_read = sorted({*of_choice, *always, *range(PROMPT, position + 1)})
                    weights = (keys[may_read] @ q * shape.dim**-0.5).softmax(0)
                    weight = dict(zip(may_read, weights.tolist(), strict=True))
                    carried = sum(weight[token] for token in may_read if token not in of_choice)
                    for token in sorted(of_choice, key=lambda token: -weight[token]):
                        if carried < mass:
                            wanted.add(token)
                        carried += weight[token]
                assert {token for token in read if token >= 0} == wanted | always
                tokens = sorted(wanted | always | set(range(PROMPT, position + 1)))
                for head in heads:
                    exact = (k[tokens] @ s.q(0)[b, head, position] * shape.dim**-0.5).softmax(0) @ v[tokens]
                    assert_close(out[b, head, 0], exact, atol=1e-5, rtol=1e-5)
                counts.append(len(wanted | always))
                fewer += len(of_choice) - len(wanted)
        assert layer.attended.prompt == pytest.approx(sum(counts) / len(counts))
    assert fewer > 0


def generated(
    name: str, ids: Tensor, placement: Any = "device", captured: bool = False, mass: float | None = 0.7, **more: Any
) -> Any:
    budget = Budget(more.pop("asked", 0.5), mass=mass, **more)
    with use_backend("torch"), attached(tiny("llama"), METHODS[name], budget=budget, placement=placement) as kv:
        engine = Engine(kv, graphs=Tape() if captured else None)
        made = engine.generate(ids, max_new_tokens=8)
        assert (made.capture_s is not None) == captured
        return made


@pytest.mark.tokens
@named
def test_tokens_and_what_was_read_are_the_same_in_each_place_in_batches_and_captured(name: str) -> None:
    ids = torch.cat([prompt(82, seed=seed) for seed in range(2)])
    made = generated(name, ids)
    whole = generated(name, ids, mass=None)
    assert made.measured["attended_prompt"] < whole.measured["attended_prompt"]
    places = (("device", True), ("host", False), ("disk", False), ("host", True))
    for placement, captured in places if METHODS[name].offloads else places[:1]:
        other = generated(name, ids, placement, captured)
        assert other.tokens == made.tokens
        assert other.measured["attended_prompt"] == pytest.approx(made.measured["attended_prompt"])
        if placement != "device":  # what is not read does not move
            read, config = made.measured["attended_prompt"] - 12 * (name == "pqcache"), tiny("llama").config
            lists = config.num_key_value_heads if name in ("pqcache", "quest-kv-head") else config.num_attention_heads
            row = config.num_hidden_layers * 2 * config.hidden_size // config.num_attention_heads * 4
            assert 0 < other.measured["moved_bytes_per_step"] <= 2 * lists * read * row * 1.001
    low, middle, high = (made.measured[f"attended_p{share}"] for share in (10, 50, 90))
    assert 0 < low <= middle <= high < whole.measured["attended_prompt"]
    assert "attended_p50" not in whole.measured
    alone = [generated(name, row) for row in ids.split(1)]
    assert [tokens for one in alone for tokens in one.tokens] == made.tokens
    read = [one.measured["attended_prompt"] for one in alone]
    assert sum(read) / 2 == pytest.approx(made.measured["attended_prompt"])


@pytest.mark.tokens
@named
def test_the_whole_mass_is_the_plain_choice_and_dense_layers_read_all(name: str) -> None:
    ids = prompt(82, seed=3)
    for asked in (0.5, 1.0):
        made, plain = generated(name, ids, mass=1.0, asked=asked), generated(name, ids, mass=None, asked=asked)
        assert made.tokens == plain.tokens
        assert made.measured["attended_prompt"] == plain.measured["attended_prompt"]
    assert generated(name, ids, asked=1.0).measured["attended_p90"] < 82
    dense = tuple(range(tiny("llama").config.num_hidden_layers))
    assert generated(name, ids, asked=1.0, dense_layers=dense).measured["attended_prompt"] == 82
    assert generated(name, ids, asked=1.0, dense_layers=dense[1:]).measured["attended_prompt"] < 82


@pytest.mark.parametrize("name", ["pqcache", "quest"])
def test_a_step_that_uses_a_choice_again_reads_no_copies(name: str) -> None:
    shape = SHAPES[1]
    s = Sequences(shape, PROMPT + STEPS)
    (layer,) = s.start(METHODS[name], Budget(35, mass=0.6), reuse_steps=1)
    s.seal([layer], 0, PROMPT)
    read = []
    for position in (PROMPT, PROMPT + 1):
        s.decode([layer], position)
        read.append(layer.bytes_read)
    lists, chosen = (6, 31) if name == "quest" else (2, 24)  # the last page has 3 tokens
    new, copies = 2 * shape.groups * 2 * shape.dim * 4, 2 * lists * chosen * (shape.dim // 2 + 4)
    assert read[0] == read[1] - new + copies  # type: ignore[operator]


@named
@pytest.mark.parametrize("budget", [0.3, 1.0])
def test_the_formula_is_what_is_held_moved_and_read_where_all_candidates_are(name: str, budget: float) -> None:
    method = METHODS[name]
    if isinstance(method, Quest):
        method = replace(method, last_page=True, select_per="kv_head")
    for placement in ("device", "host") if method.offloads else ("device",):
        measuring.assert_near(*measuring.measured(method, Budget(budget, mass=1.0), placement))


def test_methods_without_candidates_refuse_by_name() -> None:
    for method in (SparQ(), PQCache(cache_tokens=128)):
        with (
            pytest.raises(BudgetError, match=f"{type(method).__name__} takes no budget_mass=0.9"),
            attached(tiny("llama"), method, budget=Budget(0.5, mass=0.9)) as kv,
        ):
            kv.cache(capacity=90)
    with pytest.raises(BudgetError, match=r"budget_mass=0 is no share"):
        Budget(0.5, mass=0)
    with attached(tiny("llama"), Full(), budget=Budget(0.5, mass=0.9)) as kv:
        assert kv.budget is None


@pytest.mark.tokens
@named
def test_sequences_of_unequal_lengths_read_what_they_read_alone(name: str) -> None:
    """In joint steps, plain and captured, but for Quest with a shorter last page that competes, whose heads step one by
    one."""
    budget = Budget(70, mass=0.7)  # covers some of the prompts
    with attached(tiny("llama"), METHODS[name], budget=budget) as kv, use_backend("torch"):
        wanted = test_slots.alone(test_slots.engine_of(kv))
        for graphs in (None, Tape()):
            test_slots.assert_the_same(test_slots.together(test_slots.engine_of(kv, graphs=graphs)), wanted)
