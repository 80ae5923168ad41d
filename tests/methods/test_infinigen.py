"""InfiniGen against the recipe for rotary positions and grouped heads, written out in loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checks.contract import CHECKS, Check
from harness.checks.trial import Trial
from harness.engine.attach import attached
from kernels import ops
from kernels.rope import rotate
from methods.base import BudgetError, CacheState
from methods.infinigen import InfiniGen, InfiniGenRead
from methods.layers.batched import alone_because
from methods.layers.limited_pool import Eviction
from methods.parts.partial_keys import GrowingRows
from tests.methods import test_costs as costs
from tests.methods.synthetic import SHAPES, Sequences, Shape, attention
from tests.methods.test_contract import small
from tests.tiny import prompt, tiny

METHOD = InfiniGen(
    alpha=0.3,
    partial_ratio=0.3,
    dense_layers=(0,),
    skew=True,
    calibration_tokens=40,
    column_rule="query",
    group_rank="margin_max",
)
PROMPT, STEPS, LAYERS = 61, 4, 3


def random_turns(shape: Shape, seed: int = 0) -> tuple[Tensor, ...]:
    """An orthogonal matrix for each layer and KV head, which no calibration would choose."""
    draw = torch.Generator().manual_seed(seed)
    size = (shape.groups, shape.dim, shape.dim)
    return tuple(torch.linalg.qr(torch.randn(*size, generator=draw)).Q for _ in range(LAYERS))


def sealed(
    text: Sequences,
    method: InfiniGen = METHOD,
    budget: int | float = 0.4,
    skews: object = None,
    placement: str = "device",
    reuse_steps: int = 0,
) -> list[InfiniGenRead]:
    layers = text.start(
        method, budget, prepared=skews or random_turns(text.shape), placement=placement, reuse_steps=reuse_steps
    )
    text.seal(layers, 0, PROMPT)
    return [layer for layer in layers if isinstance(layer.reads, InfiniGenRead)]


def guessed_query(text: Sequences, layer: int, t: int) -> Tensor:
    """Layer l's projection of the input of layer l-1, at position t. -> [B H D]"""
    q = text.project(layer, text.hidden[layer - 1][:, t : t + 1])
    return rotate(q, text.cos[:, t : t + 1], text.sin[:, t : t + 1])[:, :, 0]


def reference_choice(
    text: Sequences, method: InfiniGen, layer: int, t: int, limit: int, skew: Tensor, prompt: int = PROMPT
) -> list[Tensor]:
    """-> [G n'] of each sequence, by steps 4 to 11 of the recipe, one head at a time."""
    shape, group = text.shape, text.shape.heads // text.shape.groups
    width = max(1, int(method.partial_ratio * shape.dim))
    query, queries, keys = guessed_query(text, layer, t), text.q(layer)[:, :, :prompt], text.k(layer)[:, :, :t]
    chosen = []
    for b in range(shape.batch):
        counts, scores = [], torch.empty(shape.groups, prompt)
        for i in range(shape.groups):
            heads = range(i * group, (i + 1) * group)
            mass = sum((queries[b, h] @ skew[i]).abs().sum(0) for h in heads)
            columns = mass.topk(width).indices.tolist()
            if method.column_rule == "union":
                key_mass = (keys[b, i, :prompt] @ skew[i]).abs().sum(0)
                columns = sorted({*columns, *key_mass.topk(width).indices.tolist()})
            partial = (keys[b, i] @ skew[i])[:, columns]
            logits = [(query[b, h] @ skew[i])[columns] @ partial.T * shape.dim**-0.5 for h in heads]
            margin = torch.stack([a - a.max() for a in logits]).amax(0)[:prompt]
            counts.append(int((margin >= -method.alpha).sum()))
            chances = sum(a[:prompt].softmax(0) for a in logits)
            assert isinstance(chances, Tensor)
            scores[i] = chances if method.group_rank == "prob_sum" else margin
        chosen.append(scores.topk(max(1, min(int(sum(counts) / len(counts)), limit))).indices)
    return chosen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "change", [{}, {"column_rule": "union"}, {"group_rank": "prob_sum"}, {"alpha": 9.0}, {"skew": False}]
)
@pytest.mark.parametrize("queued", [False, True], ids=["cpu", "gpu"])  # on a GPU counts stay on the device
def test_every_step_is_the_recipe(
    shape: Shape, change: dict[str, object], queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("methods.infinigen", "methods.parts.partial_keys"):
        monkeypatch.setattr(f"{module}.queues", lambda device: queued)
    text, method = Sequences(shape, PROMPT + STEPS, LAYERS), replace(METHOD, **change)
    layers = sealed(text, method)
    identity = torch.eye(shape.dim).expand(shape.groups, -1, -1)
    for t in range(PROMPT, PROMPT + STEPS):
        outs = text.decode(layers, t)
        assert layers[0].attended.prompt == PROMPT
        for i in (1, 2):
            skew = random_turns(shape)[i] if method.skew else identity
            expected = reference_choice(text, method, i, t, int(0.4 * PROMPT), skew)
            read = layers[i].read_positions()
            for rows, wanted in zip(read, expected, strict=True):
                assert torch.equal(rows[rows >= 0].view(shape.groups, -1).sort().values, wanted.sort().values)
            mean = sum(wanted.shape[1] for wanted in expected) / shape.batch
            assert layers[i].attended == (mean, t + 1 - PROMPT)
            positions = [[[*head, *range(PROMPT, t + 1)] for head in rows.tolist()] for rows in expected]
            x = text.at(i, t, t + 1)
            out = attention(x.q, text.k(i), text.v[i], positions, shape.dim**-0.5)
            torch.testing.assert_close(outs[i], out, atol=1e-5, rtol=1e-4)


def test_in_a_model_the_guess_is_layer_ls_query_of_the_normed_input_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("llama"), prompt(48)
    guesses, inputs = [], []
    products = ops.partial_products
    monkeypatch.setattr(ops, "partial_products", lambda guess, new: guesses.append(guess) or products(guess, new))
    method = replace(METHOD, dense_layers=(0, 1), calibration_tokens=32)
    with attached(model, method, budget=0.3, calibration=prompt(32, seed=5)) as kv, torch.inference_mode():
        cache = kv.cache(capacity=50)
        model(ids[:, :47], past_key_values=cache)
        cache.seal()
        hook = model.model.layers[1].input_layernorm.register_forward_hook(lambda *call: inputs.append(call[2]))
        try:
            model(ids[:, 47:], past_key_values=cache)
        finally:
            hook.remove()
        plain = model.model.layers[2].self_attn.q_proj(inputs[0]).view(1, 1, 8, 16).transpose(1, 2)
    [(q, *turn, basis, _)] = guesses  # layers 0 and 1 are dense
    cos, sin = model.model.rotary_emb(plain, torch.tensor([[47]]))
    assert basis is cache.layers[2].reads.basis
    torch.testing.assert_close(rotate(q, *turn), rotate(plain, cos, sin))


def test_zeros_stand_behind_partial_keys_whose_room_has_grown() -> None:
    """A step of several sequences reads rows as far as the widest ones, and so past the end of the last row."""
    text = Sequences(SHAPES[0], 9)
    rows = GrowingRows(CacheState(text.request(None)), torch.ones(1, 2, 4, 6), room=5)
    rows.grow(3)
    assert rows.stored.shape == (1, 2, 8, 6)
    with_behind = rows.stored.as_strided((1, 2, 9, 6), rows.stored.stride())
    assert with_behind[:, :, :4].eq(1).all()
    assert with_behind[:, :, 4:].eq(0).all()


def test_layers_that_the_budget_leaves_alone_do_no_work() -> None:
    text = Sequences(SHAPES[1], PROMPT + 1, LAYERS)
    layers = sealed(text, replace(METHOD, dense_layers=(0, 2)))
    text.decode(layers, PROMPT)
    assert [layer.attended.prompt == PROMPT for layer in layers] == [True, False, True]
    assert layers[2].reads.query_mass.numel() == 0


# InfiniGen with a limited pool against the paper's simulation, each policy in loops, and under the contract.

POOL_PROMPT, POOL_STEPS, LIMIT, SLOTS = 37, 5, 9, 29
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
    columns = [sum(queries[h, :POOL_PROMPT].abs().sum(0) for h in heads).topk(width).indices for heads in of_group]  # type: ignore[union-attr]
    live: list[list[int]] = [[0] for _ in of_group]
    use = [{0: 0} for _ in of_group]  # by position: how often, or when last
    steps: list[list[list[int]]] = []
    for now in range(1, POOL_PROMPT + POOL_STEPS):
        guess, margins, asked = guessed_query(text, 1, now)[b], [], []
        for i, heads in enumerate(of_group):
            past = [*live[i], *range(POOL_PROMPT, now)]
            logits = [guess[h, columns[i]] @ keys[i, past][:, columns[i]].T * shape.dim**-0.5 for h in heads]
            margins.append(torch.stack([a - a.max() for a in logits]).amax(0)[: len(live[i])])
            asked.append(int((margins[i] >= -METHOD.alpha).sum()))
        count = max(1, min(int(sum(asked) / len(asked)), LIMIT))
        fetched = [[live[i][j] for j in margins[i].topk(count).indices.tolist()] for i in range(shape.groups)]
        for i, positions in enumerate(fetched):
            for p in positions:
                use[i][p] = use[i][p] + 1 if policy == "counter" else now
            if now >= SLOTS:
                older = [*live[i], *range(POOL_PROMPT, now)][: SLOTS // 2]
                rank = {p: p if policy == "fifo" else use[i][p] for p in older if p < POOL_PROMPT}
                live[i].remove(min(rank, key=lambda p: (rank[p], p)))
            if now < POOL_PROMPT:
                live[i].append(now)
                use[i][now] = now if policy == "lru" else 0
        steps.append(fetched)
    return steps[POOL_PROMPT - 1 :]


def started(text: Sequences, method: InfiniGen, placement: str = "device", **how: Any) -> list[InfiniGenRead]:
    layers = text.start(method, LIMIT, placement=placement)
    text.prefill(layers, 0, POOL_PROMPT, **how)
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
    text = Sequences(shape, POOL_PROMPT + POOL_STEPS, 2)
    layers = started(text, replace(POOLED, pool_policy=policy))
    expected = [reference(text, policy, b) for b in range(shape.batch)]
    for step, t in enumerate(range(POOL_PROMPT, POOL_PROMPT + POOL_STEPS)):
        out = text.decode(layers, t)[1]
        fetched = [steps[step] for steps in expected]
        read = layers[1].read_positions()
        assert [[sorted(p for p in head if p >= 0) for head in heads] for heads in read.tolist()] == [
            [sorted(head) for head in heads] for heads in fetched
        ]
        positions = [[[*head, *range(POOL_PROMPT, t + 1)] for head in heads] for heads in fetched]
        wanted = attention(text.at(1, t, t + 1).q, text.k(1), text.v[1], positions, shape.dim**-0.5)
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
        assert layers[0].attended.prompt == POOL_PROMPT  # dense


def test_what_cannot_be_done_is_refused_by_name() -> None:
    text = Sequences(SHAPES[0], POOL_PROMPT + POOL_STEPS, 2)
    layers = started(text, POOLED)
    assert layers[1].capture_refusal() is None
    assert "limited pool" in str(alone_because(layers[1]))
    assert layers[0].capture_refusal() is None
    with pytest.raises(ValueError, match="further turn"):
        layers[1].absorb(text.at(1, POOL_PROMPT, POOL_PROMPT + 1))
    with pytest.raises(ValueError, match="reuse_steps"):
        text.start(POOLED, LIMIT, reuse_steps=1)
    with pytest.raises(ValueError, match=f"at least {POOL_STEPS + 1} tokens"):
        started(text, replace(POOLED, pool_capacity=POOL_STEPS))
    with pytest.raises(BudgetError, match=r"budget=1.0 covers"):
        text.start(POOLED, 1.0)
    with pytest.raises(ValueError, match="pool_policy"):
        replace(METHOD, pool_policy="random")  # type: ignore[arg-type]


@pytest.mark.parametrize(("budget", "capacity"), [(400, 30), (LIMIT, 0.1)], ids=["covered", "no room"])
def test_a_prompt_that_is_too_short_for_the_pool_is_read_whole(budget: int, capacity: float) -> None:
    """Because the budget covers it, or because a share of it has no slots beyond those of the new tokens."""
    text = Sequences(SHAPES[1], POOL_PROMPT + POOL_STEPS, 2)
    layers = text.start(replace(POOLED, pool_capacity=capacity), budget)
    text.seal(layers, 0, POOL_PROMPT)
    full = text.start(METHOD, 400)
    text.seal(full, 0, POOL_PROMPT)
    assert "leaves the pool" in str(layers[1].fallback)
    assert full[1].fallback is None
    for t in range(POOL_PROMPT, POOL_PROMPT + POOL_STEPS):
        torch.testing.assert_close(text.decode(layers, t)[1], text.decode(full, t)[1])
    assert layers[1].attended.prompt == POOL_PROMPT


LIMITED = (  # a pool has no room for what a budget of 1.0 or a further turn would keep
    "budget kept", "chunks as whole", "batch as alone", "host as device", "shared prefill", "fresh memory", "bf16",
)  # fmt: skip


@pytest.mark.parametrize("check", [check for check in CHECKS if check.name in LIMITED], ids=lambda check: check.name)
def test_the_contract_holds(check: Check) -> None:
    method = replace(small("infinigen"), pool_capacity=0.75, pool_policy="lru")  # type: ignore[type-var]
    check.run(Trial(method, tiny("llama"), 83))


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
