"""InfiniGen against the recipe for rotary positions and grouped heads, written out in loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from harness.engine.attach import attached
from kernels.rope import rotate
from methods.base import Budget, CacheState, Plan
from methods.infinigen import InfiniGen, InfiniGenRead
from methods.parts.growing import GrowingRows
from methods.parts.skew import skewing
from tests.methods.recorded import Recorded
from tests.methods.synthetic import SHAPES, Sequences, Shape, attention
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
            assert isinstance(mass, Tensor)
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
def test_every_step_is_the_recipe(shape: Shape, change: dict[str, object]) -> None:
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
            assert read is not None
            for rows, wanted in zip(read, expected, strict=True):
                assert torch.equal(rows[rows >= 0].view(shape.groups, -1).sort().values, wanted.sort().values)
            mean = sum(wanted.shape[1] for wanted in expected) / shape.batch
            assert layers[i].attended == (mean, t + 1 - PROMPT)
            positions = [[[*head, *range(PROMPT, t + 1)] for head in rows.tolist()] for rows in expected]
            x = text.at(i, t, t + 1)
            out = attention(x.q, text.k(i), text.v[i], positions, shape.dim**-0.5)
            torch.testing.assert_close(outs[i], out, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("change", [{}, {"alpha": 99.0}, {"column_rule": "query"}])
def test_on_a_models_keys_the_choice_is_the_released_codes(change: dict[str, object]) -> None:
    """It knows no grouped heads, so keys are repeated to the query heads: each has its own columns (the union of its
    queries' and its keys'), margin and maximum, and all fetch the mean of what they ask for."""
    prompt, limit = 650, 130
    text, method = Recorded(prompt + STEPS, layers=[12, 13, 14, 15], repeated=True), replace(InfiniGen(), **change)
    skews = method.prepare(text.specs, lambda _: (text.at(i, 0, prompt) for i in range(4)))
    layers = text.start(method, limit, prepared=skews)
    text.seal(layers, 0, prompt)
    counts = []
    for t in range(prompt, prompt + STEPS):
        text.decode(layers, t)
        for i in (2, 3):  # 0 and 1 are dense
            (expected,) = reference_choice(text, method, i, t, limit, skews[i], prompt)
            read = layers[i].read_positions()
            assert read is not None
            assert torch.equal(read[0].sort().values, expected.sort().values)
            counts.append(expected.shape[1])
    assert (set(counts) == {limit}) == ("alpha" in change)  # else the margin ends before the budget does


def test_sequences_of_a_batch_ask_for_themselves() -> None:
    text = Sequences(SHAPES[1], PROMPT + STEPS, LAYERS)
    layers, different = sealed(text), 0
    for t in range(PROMPT, PROMPT + STEPS):
        text.decode(layers, t)
        different += len(set(layers[2].reads.counts)) > 1
    assert different


def test_the_counts_vary_with_the_queries_and_stay_within_the_budget() -> None:
    text = Sequences(SHAPES[1], PROMPT + 8, LAYERS)
    layers, counts = sealed(text), set()
    for t in range(PROMPT, PROMPT + 8):
        text.decode(layers, t)
        counts.add(layers[2].attended.prompt)
    assert len(counts) > 2
    assert max(counts) <= int(0.4 * PROMPT)


@pytest.mark.parametrize("shape", SHAPES)
def test_with_all_columns_the_logits_are_exact_for_every_skew(shape: Shape) -> None:
    """And the skew acts after the rotation: folded into the weights it would change them."""
    text, method = Sequences(shape, PROMPT + 1, LAYERS), replace(METHOD, partial_ratio=1.0)
    q, k, group = text.q(1)[:, :, PROMPT:], text.k(1)[:, :, :PROMPT], shape.heads // shape.groups
    exact = (q @ k.repeat_interleave(group, 1).transpose(-1, -2)).squeeze(2) * shape.dim**-0.5
    calibrated = tuple(skewing(text.q(i)[:1], shape.groups) for i in range(LAYERS))
    for skews in (random_turns(shape), calibrated, None):
        layers = sealed(text, replace(method, skew=skews is not None), skews=skews)
        torch.testing.assert_close(layers[1].reads.logits(q).flatten(1, 2), exact, atol=1e-4, rtol=1e-4)
    skew = random_turns(shape)[1]
    folded_q = rotate(
        text.project(1, text.hidden[1][:, PROMPT:]) @ skew.repeat_interleave(group, 0),
        text.cos[:, PROMPT:],
        text.sin[:, PROMPT:],
    )
    folded_k = rotate(text.raw_k[1] @ skew, text.cos, text.sin)[:, :, :PROMPT].repeat_interleave(group, 1)
    folded = (folded_q @ folded_k.transpose(-1, -2)).squeeze(2) * shape.dim**-0.5
    assert (folded - exact).abs().mean() > 0.5 * exact.abs().mean()


def test_with_all_columns_and_the_layers_own_input_each_head_finds_its_exact_order() -> None:
    text = Sequences(Shape(4, 4, 64), PROMPT + 1, LAYERS)
    text.hidden[0] = text.hidden[1]  # the layer before has the same input
    layers = sealed(text, replace(METHOD, partial_ratio=1.0, alpha=1e9), budget=7)
    text.decode(layers, PROMPT)
    exact = (text.q(1)[:, :, PROMPT:] @ text.k(1)[:, :, :PROMPT].transpose(-1, -2)).squeeze(2).topk(7).indices
    read = layers[1].read_positions()
    assert read is not None
    assert torch.equal(read.sort().values, exact.sort().values)


def test_boundless_alpha_and_budget_give_the_dense_output() -> None:
    text = Sequences(SHAPES[1], PROMPT + 1, LAYERS)
    layers = sealed(text, replace(METHOD, alpha=float("inf")))
    for layer in layers[1:]:
        layer.reads.plan = Plan(0, 0, PROMPT)
    dense = sealed(text, budget=1.0)
    for ours, full in zip(text.decode(layers, PROMPT), text.decode(dense, PROMPT), strict=True):
        torch.testing.assert_close(ours, full)
    assert layers[1].attended.prompt == PROMPT
    assert dense[1].reads.plan is None


def test_threshold_is_each_heads_own() -> None:
    """A flat head asks for all tokens, a peaked one for its peak: their union, whichever comes first."""
    text = Sequences(Shape(2, 1, 64), PROMPT + 1, LAYERS)
    layer = sealed(text)[1]
    logits = torch.zeros(1, 1, 2, PROMPT)
    logits[..., 0, 5] = 30.0
    for order in ([0, 1], [1, 0]):
        assert layer.reads.choose(logits[:, :, order], 60)[1] == [60]
    peaked = logits.clone()
    peaked[..., 1, 9] = 20.0
    assert sorted(layer.reads.choose(peaked, 60)[0].flatten().tolist()) == [5, 9]


def test_generated_tokens_raise_the_threshold_but_are_no_candidates() -> None:
    text = Sequences(Shape(2, 1, 64), PROMPT + 1, LAYERS)
    layer = sealed(text)[1]
    logits = torch.zeros(1, 1, 2, PROMPT + 3)
    logits[..., PROMPT + 1] = 50.0
    logits[..., 7] = 49.5
    assert layer.reads.choose(logits, 60)[0].tolist() == [[[7]]]


def test_skewing_is_orthogonal_and_packs_the_queries_into_few_columns() -> None:
    text = Sequences(SHAPES[1], 200)
    spread = torch.logspace(0, -3, 96)
    mixed = text.q(0)[:1] @ torch.diag(spread) @ random_turns(text.shape)[0][0]
    skews = skewing(mixed, 2)
    torch.testing.assert_close(skews @ skews.transpose(1, 2), torch.eye(96).expand(2, -1, -1), atol=1e-5, rtol=0)
    energy = (mixed[0].unflatten(0, (2, 3)) @ skews.unsqueeze(1)).square().sum((1, 2))
    assert (energy[:, :-1] >= energy[:, 1:] - 1e-4).all()
    plain = mixed[0].unflatten(0, (2, 3)).square().sum((1, 2))
    assert (energy[:, :10].sum(1) / energy.sum(1) > 2 * plain.topk(10).values.sum(1) / plain.sum(1)).all()


def test_host_fetches_what_it_reads_and_agrees_also_in_a_further_turn() -> None:
    text = Sequences(SHAPES[1], PROMPT + STEPS + 20, LAYERS)
    outs = []
    for placement in ("device", "host"):
        layers = sealed(text, placement=placement)
        before, fetched, steps = layers[0].cache.traffic.to_device_bytes, 0, []
        for t in range(PROMPT, PROMPT + STEPS):
            steps.append(text.decode(layers, t)[2])
            fetched += sum(max(layer.reads.counts) for layer in layers[1:])
        moved = layers[0].cache.traffic.to_device_bytes - before
        row_bytes = 2 * text.shape.dim * 4 * text.shape.groups * text.shape.batch
        assert moved == (fetched * row_bytes if placement == "host" else 0)
        again = PROMPT + STEPS
        text.seal(layers, again, again + 19)
        outs.append(torch.cat([*steps, text.decode(layers, again + 19)[2]], 2))
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("group_rank", ["margin_max", "prob_sum"])
def test_counts_that_stay_on_the_device_choose_the_same(
    group_rank: Literal["margin_max", "prob_sum"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a step does not read how many tokens it asks for."""
    text, method = Sequences(SHAPES[1], PROMPT + STEPS, LAYERS), replace(METHOD, group_rank=group_rank)
    listed = sealed(text, method)
    steps = [text.decode(listed, t)[2] for t in range(PROMPT, PROMPT + STEPS)]
    monkeypatch.setattr("methods.infinigen.queues", lambda device: True)
    on_device = sealed(text, method)
    torch.testing.assert_close([text.decode(on_device, t)[2] for t in range(PROMPT, PROMPT + STEPS)], steps)
    for one, other in zip(listed[1:], on_device[1:], strict=True):
        assert one.attended == other.attended
        counts, generated = other.reading
        assert isinstance(counts, Tensor)
        assert (counts.tolist(), generated) == (one.reads.counts, STEPS)
        wanted, got = one.read_positions(), other.read_positions()
        assert wanted is not None
        assert got is not None
        width = wanted.shape[2]
        assert torch.equal(got.sort(-1, descending=True).values[..., :width], wanted.sort(-1, descending=True).values)


def test_a_selection_serves_further_steps_where_that_is_allowed() -> None:
    text = Sequences(SHAPES[1], PROMPT + STEPS, LAYERS)
    layers, seen = sealed(text, reuse_steps=1), []
    for t in range(PROMPT, PROMPT + STEPS):
        text.decode(layers, t)
        assert layers[2].reads.rows is not None
        seen.append(layers[2].reads.rows.tolist())
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_in_a_model_the_guess_is_layer_ls_query_of_the_normed_input_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("llama"), prompt(48)
    guesses, inputs = [], []
    logits = InfiniGenRead.logits
    monkeypatch.setattr(
        InfiniGenRead, "logits", lambda self, q: guesses.append((self.spec.index, q)) or logits(self, q)
    )
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
    [(layer, q)] = guesses  # layers 0 and 1 are dense
    cos, sin = model.model.rotary_emb(plain, torch.tensor([[47]]))
    assert layer == 2
    torch.testing.assert_close(q, rotate(plain, cos, sin))


def test_prepare_stacks_the_rotated_queries_of_a_group() -> None:
    text = Sequences(Shape(6, 2, 64), 40, LAYERS)
    skews = METHOD.prepare(text.specs, lambda tokens: (text.at(i, 0, tokens) for i in range(LAYERS)))
    assert skews is not None
    stacked = text.q(1)[0, 3:6].reshape(-1, 64)
    expected = torch.linalg.svd(stacked, full_matrices=False).Vh.T
    assert ((skews[1][1].T @ expected).abs() - torch.eye(64)).abs().max() < 1e-3  # equal up to signs
    assert replace(METHOD, skew=False).prepare(text.specs, pytest.fail) is None


def test_layers_that_the_budget_leaves_alone_do_no_work() -> None:
    text = Sequences(SHAPES[1], PROMPT + 1, LAYERS)
    method = replace(METHOD, dense_layers=[0, 2])
    layers = sealed(text, method)
    text.decode(layers, PROMPT)
    assert [layer.attended.prompt == PROMPT for layer in layers] == [True, False, True]
    assert layers[2].reads.query_mass.numel() == 0
    assert layers[1].request.budget == Budget(0.4, dense_layers=(0, 2))
    assert hash(method)


def test_zeros_stand_behind_partial_keys_whose_room_has_grown() -> None:
    """A step of several sequences reads rows as far as the widest ones, and so past the end of the last row."""
    text = Sequences(SHAPES[0], 9)
    rows = GrowingRows(CacheState(text.request(None)), torch.ones(1, 2, 4, 6), room=5)
    rows.grow(3)
    assert rows.stored.shape == (1, 2, 8, 6)
    with_behind = rows.stored.as_strided((1, 2, 9, 6), rows.stored.stride())
    assert with_behind[:, :, :4].eq(1).all()
    assert with_behind[:, :, 4:].eq(0).all()


def test_bad_parameters_are_refused() -> None:
    for change in (
        {"alpha": -1.0},
        {"partial_ratio": 0.0},
        {"dense_layers": (1,)},
        {"column_rule": "key"},
        {"group_rank": "sum"},
    ):
        with pytest.raises(ValueError, match=next(iter(change))):
            replace(METHOD, **change)
