"""InfiniGen with a limited pool against the paper's simulation, each policy in loops, and under the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from methods.base import BudgetError
from methods.infinigen import InfiniGen, InfiniGenRead
from methods.layers.batched import alone_because
from methods.layers.limited_pool import Eviction
from tests.methods import test_contract as contract
from tests.methods import test_costs as costs
from tests.methods.synthetic import SHAPES, Sequences, Shape, attention
from tests.methods.test_infinigen import METHOD, guessed_query

PROMPT, STEPS, LIMIT, SLOTS = 37, 5, 9, 29
POLICIES: tuple[Eviction, ...] = ("counter", "fifo", "lru")
POOLED = replace(METHOD, skew=False, pool_capacity=SLOTS)


def reference(text: Sequences, policy: Eviction, b: int) -> list[list[list[int]]]:
    """What each KV head of layer 1 fetches in each step of sequence b, the prompt's tokens before the generated ones.

    Everything by position: no store is ever made smaller.
    """
    shape, group = text.shape, text.shape.heads // text.shape.groups
    width = int(METHOD.partial_ratio * shape.dim)
    queries, keys = text.q(1)[b], text.k(1)[b]
    of_group = [range(i * group, (i + 1) * group) for i in range(shape.groups)]
    columns = [sum(queries[h, :PROMPT].abs().sum(0) for h in heads).topk(width).indices for heads in of_group]  # type: ignore[union-attr]
    live: list[list[int]] = [[0] for _ in of_group]
    use = [{0: 0} for _ in of_group]  # by position: how often, or when last
    steps: list[list[list[int]]] = []
    for now in range(1, PROMPT + STEPS):
        guess, margins, asked = guessed_query(text, 1, now)[b], [], []
        for i, heads in enumerate(of_group):
            past = [*live[i], *range(PROMPT, now)]
            logits = [guess[h, columns[i]] @ keys[i, past][:, columns[i]].T * shape.dim**-0.5 for h in heads]
            margins.append(torch.stack([a - a.max() for a in logits]).amax(0)[: len(live[i])])
            asked.append(int((margins[i] >= -METHOD.alpha).sum()))
        count = max(1, min(int(sum(asked) / len(asked)), LIMIT))
        fetched = [[live[i][j] for j in margins[i].topk(count).indices.tolist()] for i in range(shape.groups)]
        for i, positions in enumerate(fetched):
            for p in positions:
                use[i][p] = use[i][p] + 1 if policy == "counter" else now
            if now >= SLOTS:
                older = [*live[i], *range(PROMPT, now)][: SLOTS // 2]
                rank = {p: p if policy == "fifo" else use[i][p] for p in older if p < PROMPT}
                live[i].remove(min(rank, key=lambda p: (rank[p], p)))
            if now < PROMPT:
                live[i].append(now)
                use[i][now] = now if policy == "lru" else 0
        steps.append(fetched)
    return steps[PROMPT - 1 :]


def started(text: Sequences, method: InfiniGen, placement: str = "device", **how: Any) -> list[InfiniGenRead]:
    layers = text.start(method, LIMIT, placement=placement)
    text.prefill(layers, 0, PROMPT, **how)
    for layer in layers:
        layer.seal()
    return [layer for layer in layers if isinstance(layer.reads, InfiniGenRead)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("queued", [False, True], ids=["cpu", "gpu"])  # on a GPU counts stay on the device
def test_every_step_is_the_papers_simulation(
    shape: Shape, policy: Eviction, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("methods.infinigen.queues", lambda device: queued)
    text = Sequences(shape, PROMPT + STEPS, 2)
    layers = started(text, replace(POOLED, pool_policy=policy))
    expected = [reference(text, policy, b) for b in range(shape.batch)]
    for step, t in enumerate(range(PROMPT, PROMPT + STEPS)):
        out = text.decode(layers, t)[1]
        fetched = [steps[step] for steps in expected]
        read = layers[1].read_positions()
        assert [[sorted(p for p in head if p >= 0) for head in heads] for heads in read.tolist()] == [
            [sorted(head) for head in heads] for heads in fetched
        ]
        positions = [[[*head, *range(PROMPT, t + 1)] for head in heads] for heads in fetched]
        wanted = attention(text.at(1, t, t + 1).q, text.k(1), text.v[1], positions, shape.dim**-0.5)
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
        assert layers[0].attended.prompt == PROMPT  # dense


def test_what_cannot_be_done_is_refused_by_name() -> None:
    text = Sequences(SHAPES[0], PROMPT + STEPS, 2)
    layers = started(text, POOLED)
    assert layers[1].capture_refusal() is None
    assert "limited pool" in str(alone_because(layers[1]))
    assert layers[0].capture_refusal() is None
    with pytest.raises(ValueError, match="further turn"):
        layers[1].absorb(text.at(1, PROMPT, PROMPT + 1))
    with pytest.raises(ValueError, match="reuse_steps"):
        text.start(POOLED, LIMIT, reuse_steps=1)
    with pytest.raises(ValueError, match=f"at least {STEPS + 1} tokens"):
        started(text, replace(POOLED, pool_capacity=STEPS))
    with pytest.raises(BudgetError, match=r"budget=1.0 covers"):
        text.start(POOLED, 1.0)
    with pytest.raises(ValueError, match="pool_policy"):
        replace(METHOD, pool_policy="random")  # type: ignore[arg-type]


@pytest.mark.parametrize(("budget", "capacity"), [(400, 30), (LIMIT, 0.1)], ids=["covered", "no room"])
def test_a_prompt_that_is_too_short_for_the_pool_is_read_whole(budget: int, capacity: float) -> None:
    """Because the budget covers it, or because a share of it has no slots beyond those of the new tokens."""
    text = Sequences(SHAPES[1], PROMPT + STEPS, 2)
    layers = text.start(replace(POOLED, pool_capacity=capacity), budget)
    text.seal(layers, 0, PROMPT)
    full = text.start(METHOD, 400)
    text.seal(full, 0, PROMPT)
    assert "leaves the pool" in str(layers[1].fallback)
    assert full[1].fallback is None
    for t in range(PROMPT, PROMPT + STEPS):
        torch.testing.assert_close(text.decode(layers, t)[1], text.decode(full, t)[1])
    assert layers[1].attended.prompt == PROMPT


RULES = [
    contract.test_half_precision_stays_half_precision,
    contract.test_prefill_in_chunks_changes_nothing,
    contract.test_sequences_of_a_batch_do_not_see_one_another,
]
WITH = {
    contract.test_keys_and_values_elsewhere_change_nothing: [("host",), ("disk",)],
    contract.test_no_method_reads_more_of_the_prompt_than_its_budget: [(61, 0.4), (100, 33), (25, 24)],
    contract.test_memory_that_was_never_written_is_never_read: [("device",), ("host",)],
    contract.test_a_shared_prefill_changes_nothing: [(None,), (19,)],
}
CALLS = [(rule, ()) for rule in RULES] + [(rule, values) for rule, many in WITH.items() for values in many]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("rule", "values"), CALLS, ids=lambda x: getattr(x, "__name__", None))
def test_the_contract_holds(rule: Any, values: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    method = replace(contract.small("infinigen"), pool_capacity=0.75, pool_policy="lru")  # type: ignore[type-var]
    monkeypatch.setattr(contract, "small", lambda name: method)
    rule("infinigen", *values)


@pytest.mark.parametrize("capacity", [0.75, 0.999, 390])
@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("column_rule", ["query", "union"])
def test_the_cost_is_what_is_held_and_moved(capacity: float, placement: str, column_rule: Any) -> None:
    changes = {"pool_capacity": capacity, "pool_policy": "fifo", "partial_ratio": 0.5, "skew": False}
    method = replace(costs.method_of("infinigen"), column_rule="query", **changes)  # type: ignore[type-var]
    budget = costs.Budget(0.3 if column_rule == "query" else 350)
    costs.assert_near(*costs.measured(method, budget, placement))


@pytest.mark.parametrize(
    ("asked", "slots"), [(None, None), (1.0, None), (0.8, 80), (0.005, 0), (100, None), (300, None), (1, 1), (99, 99)]
)
def test_a_share_is_of_all_tokens(asked: float | None, slots: int | None) -> None:
    assert replace(METHOD, pool_capacity=asked).slots(100) == slots
