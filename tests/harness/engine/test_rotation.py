"""Rotations that depend on the length of the text give the tokens of `model.generate` on the whole prompt."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.testing import assert_close
from transformers import PreTrainedModel

from harness import Engine, RunningBatch, attached
from harness.checks.trial import Step, turn
from harness.engine.attach import observer
from harness.engine.cache import KVCache, UnsupportedError
from harness.engine.hf import channel_pairings, layer_specs
from harness.engine.pairing import Angles, Pairing
from harness.engine.rotation import AT_ONCE, rotation_table
from kernels.rope import rotate, unrotate
from methods.full import Full
from tests.batches import together
from tests.methods.test_contract import small
from tests.tape import Tape
from tests.tiny import BORDER, by_length, fresh, prompt, tiny

NEW = 10
LENGTHS = (40, 60, BORDER - 1, BORDER, BORDER + 1, 100)  # below the border, across it while decoding, and above it
CASES = [("phi3", "longrope"), ("phi4", "longrope"), ("llama", "longrope"), ("llama", "dynamic"), ("qwen3", "dynamic")]
PHI = ("phi3", "phi4")  # transformers drops the cache of their texts where these outgrow the original length
each_model = pytest.mark.parametrize(("architecture", "kind"), CASES)
each_length = pytest.mark.parametrize("length", LENGTHS)


def text(length: int) -> Tensor:
    return prompt(length, seed=length)


@cache
def wanted(architecture: str, kind: str, length: int) -> list[int]:
    """What `generate` of a model that has seen no other text answers."""
    return by_loop(by_length(architecture, kind), text(length))[0]


def by_loop(model, ids: Tensor, **more) -> list[list[int]]:  # type: ignore[no-untyped-def]
    whole = model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, **more)
    answers: list[list[int]] = whole[:, ids.shape[1] :].tolist()
    return answers


@each_model
@pytest.mark.parametrize("chunk", [None, 32])
def test_answers_are_those_of_generate_one_after_the_other(architecture: str, kind: str, chunk: int | None) -> None:
    """Whole or in chunks, sealed before the question or behind it, whatever ran before."""
    with attached(by_length(architecture, kind), Full()) as kv:
        engine = Engine(kv, prefill_chunk=chunk)
        for length in (100, *LENGTHS, 40):
            for context in (None, length - 10):
                generation = engine.generate(text(length), max_new_tokens=NEW, context_tokens=context)
                assert generation.tokens[0] == wanted(architecture, kind, length), (length, context)
                crosses = length <= BORDER < length + NEW - 1
                assert generation.recomputed == (architecture in PHI and crosses)


@each_model
@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_of_other_lengths_changes_no_answer(architecture: str, kind: str, ahead: bool) -> None:
    """Also where steps may run ahead, which only captured ones do: none of these is captured."""
    with attached(by_length(architecture, kind), Full()) as kv:
        engine, slots = Engine(kv, graphs=(tape := Tape())), []
        batch = RunningBatch(engine)
        for length in LENGTHS:
            slots.append(engine.join(batch, text(length), max_new_tokens=NEW))
            batch.step()
        while batch.sequences:
            if ahead:
                batch.run()
            else:
                batch.step()
    assert tape.captured == 0
    assert "depend on the length" in str(engine.plain_steps)
    assert [slot.out.tokens[0] for slot in slots] == [wanted(architecture, kind, length) for length in LENGTHS]


@each_model
def test_transformers_own_loop_gives_the_same(architecture: str, kind: str) -> None:
    """One text after the other, and texts that it pads; a Phi-3 drops the cache of all rows at once."""
    model = by_length(architecture, kind)
    below = (40, 55, 45) if architecture in PHI else LENGTHS
    ids = torch.cat([pad(text(length), (max(below) - length, 0)) for length in below])
    mask = torch.cat([pad(torch.ones_like(text(length)), (max(below) - length, 0)) for length in below])
    with attached(model, Full()):
        for length in LENGTHS:
            assert by_loop(model, text(length)) == [wanted(architecture, kind, length)]
        padded = by_loop(model, ids, attention_mask=mask)
    assert padded[:2] == [wanted(architecture, kind, length) for length in below[:2]]
    if architecture not in PHI:
        assert padded == [wanted(architecture, kind, length) for length in below]


@pytest.mark.parametrize("name", ["snapkv", "shadowkv", "infllm", "pqcache"])
@each_length
def test_methods_compute_and_seal_the_whole_text_again(name: str, length: int) -> None:
    """In our loop as in transformers', which drops the cache of a LongRoPE text once."""
    model, method = by_length("phi3", "longrope"), small(name)
    budget = 0.5 if method.uses_budget else None
    with attached(model, method, budget=budget) as kv:
        ours = Engine(kv).generate(text(length), max_new_tokens=NEW)
        assert by_loop(model, text(length)) == ours.tokens


@each_model
def test_nothing_of_a_text_is_left_in_the_models_own_module(architecture: str, kind: str) -> None:
    model, fresh = by_length(architecture, kind), by_length(architecture, kind)
    with attached(model, Full()) as kv:
        Engine(kv).generate(text(100), max_new_tokens=NEW)
        by_loop(model, text(100))
    assert by_loop(model, text(BORDER)) == by_loop(fresh, text(BORDER))
    assert type(model.model.rotary_emb) is type(fresh.model.rotary_emb)


def test_angles_of_the_prompts_keys_stay_while_a_dynamic_text_grows() -> None:
    """As in `generate`: each new token is rotated for the text that it ends."""
    with attached(by_length("llama", "dynamic"), Full()) as kv:
        assert [kv.rotary.stage(tokens) for tokens in (1, BORDER, BORDER + 1, 100)] == [0, 0, BORDER + 1, 100]
        like, places = torch.empty(0), torch.arange(100)[None]
        cos, _ = kv.rotary.of_texts(like, places, [100])
        fresh = by_length("llama", "dynamic").model.rotary_emb
        assert torch.equal(cos, fresh(like, places)[0])
        parts = [kv.rotary.of_texts(like, part, [100])[0] for part in places.split(30, 1)]
        assert torch.equal(torch.cat(parts, 1), cos)


def test_a_cache_that_was_not_told_the_text_says_so() -> None:
    with attached(by_length("phi3", "longrope"), Full()) as kv:
        engine, cache = Engine(kv), kv.start(KVCache, capacity=BORDER + 4)
        cache.num_tokens = BORDER
        with pytest.raises(UnsupportedError, match=r"outgrows 64 tokens.*cache.fed.set"):
            engine.decode(text(1), cache, None)


BY_POSITION: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": BORDER,
    },
    "yarn": {"factor": 4.0},
}  # fmt: skip


def by_position(kind: str, window: int) -> PreTrainedModel:
    """A fresh model whose rotation is the same for all lengths."""
    rope = {"rope_type": kind, "rope_theta": 10000.0} | BY_POSITION[kind]
    return fresh("llama", rope_parameters=rope, max_position_embeddings=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", BY_POSITION)
def test_a_table_has_the_bits_that_each_position_gets_alone(kind: str, dtype: torch.dtype) -> None:
    window = AT_ONCE + 100
    rotary, like = by_position(kind, window).get_decoder().rotary_emb, torch.empty(1, 1, 1, dtype=dtype)
    table = rotation_table(rotary, window, like)
    assert table is not None
    for position in (0, 1, 77, AT_ONCE - 1, AT_ONCE, window - 1):
        for part, alone in zip(table, rotary(like, torch.tensor([[position]])), strict=True):
            assert torch.equal(part[position], alone[0, 0])
    assert rotation_table(rotary, 1 << 20, torch.empty(1, 1, 1, dtype=torch.float32)) is None  # 128 MiB


@pytest.mark.tokens
@pytest.mark.parametrize("kind", BY_POSITION)
def test_captured_steps_take_their_angles_from_a_table(kind: str) -> None:
    """Sequences of other lengths come and go, and take over kept steps; one has room for more tokens than the window
    has, so that its steps compute their angles, as does every batch that it is in."""
    window, new = 112, 6
    with attached(by_position(kind, window), Full()) as kv:
        plain, engine = Engine(kv), Engine(kv, graphs=(tape := Tape()))
        engine.generate(text(60), max_new_tokens=2)  # the first answer is checked, so that its step is not kept
        captured = []
        for lengths in ((100,), (100, 83, 105), (97,), (110,), (90,), (108,), (101, 110, 70), (72, 104, 99)):
            for length, made in zip(lengths, together(engine, [*map(text, lengths)], new), strict=True):
                assert made.tokens == plain.generate(text(length), max_new_tokens=new).tokens
            captured.append(tape.captured)
    assert engine.plain_steps is None
    assert engine.forward is not None
    assert engine.forward._table is not None
    assert engine.forward._table.shape[1] == window
    assert captured == [2, 3, 3, 4, 4, 4, 5, 5]


# Models that rotate a part of each head, or neighbouring channels together: what methods make of their keys.

KNOW_ROTATIONS = ("shadowkv", "lm_infinite", "infllm", "streaming", "infinigen")
CALIBRATION = prompt(64, seed=9)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "partial_rotary_factor": 0.5}
D = 16  # channels of a head


@pytest.mark.parametrize(
    ("architecture", "pairing"),
    [
        ("llama", Pairing(D)),
        ("gpt_oss", Pairing(D, angles=Angles.ONCE)),
        ("phi4", Pairing(12)),
        ("glm", Pairing(8, neighbours=True)),
        ("glm4", Pairing(8, neighbours=True)),
        ("cohere", Pairing(D, neighbours=True, angles=Angles.IN_A_ROW)),
        ("stablelm", Pairing(4)),  # which hands only the channels that turn to the function that rotates
    ],
)
def test_a_model_is_asked_how_it_rotates(architecture: str, pairing: Pairing) -> None:
    model = tiny(architecture)
    assert channel_pairings(model)[0] == pairing
    assert {spec.rotary_dim for spec in layer_specs(model)} == {pairing.width}


def test_a_rotation_that_methods_could_not_undo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos, -sin), rotate(k, cos, -sin)

    monkeypatch.setattr("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", backwards)
    with pytest.raises(UnsupportedError, match="LlamaAttention does not rotate"), attached(tiny("llama"), Full()):
        pass


def projected_keys(model: PreTrainedModel, layer: int, hidden: Tensor) -> Tensor:
    """[B G T D] keys before their rotation, in the model's own order of channels."""
    attention: Any = model.model.layers[layer].self_attn
    rows = attention.k_proj(hidden) if hasattr(attention, "k_proj") else attention.qkv_proj(hidden)[..., 8 * D : 10 * D]
    return rows.unflatten(-1, (2, D)).transpose(1, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny("glm"),
        lambda: fresh("glm", rope_parameters=YARN),  # stretched: cos and sin are above 1
        lambda: tiny("glm4"),
        lambda: by_length("phi4", "longrope"),
    ],
)
@torch.no_grad()
def test_a_rotation_undone_leaves_the_keys_before_it(make: Any) -> None:
    model, ids = make(), prompt(BORDER + 20)
    pairing = channel_pairings(model)[0]
    for layer, x in enumerate(observer(model, layer_specs(model), ids)(ids.shape[1])):
        before = pairing.in_halves(projected_keys(model, layer, x.hidden))
        assert x.cos.shape[-1] == pairing.width < D
        assert_close(unrotate(x.k, x.cos, x.sin), before, atol=1e-4, rtol=1e-4)
        assert_close(rotate(before, x.cos, x.sin), x.k, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(x.k[..., : pairing.width], before[..., : pairing.width], atol=0.1)


ORDERS = {  # channels of a model in the order in which whole heads are rotated in halves, those that stay still by 0
    "glm": [0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7, 12, 13, 14, 15],
    "phi4": [0, 1, 2, 3, 4, 5, 12, 13, 6, 7, 8, 9, 10, 11, 14, 15],
}


@cache
def twin(architecture: str) -> PreTrainedModel:
    """A Qwen2 that computes what a tiny model does, but rotates whole heads in halves, some of their channels by 0."""
    model: Any = tiny(architecture)
    other: Any = fresh("qwen2", rms_norm_eps=model.config.rms_norm_eps)
    own = {name: torch.zeros_like(weights) for name, weights in other.state_dict().items() if name.endswith("bias")}
    own |= model.state_dict()
    joined = {
        "qkv_proj": (("q_proj", 8 * D), ("k_proj", 2 * D), ("v_proj", 2 * D)),
        "gate_up_proj": (("gate_proj", 160), ("up_proj", 160)),
    }
    for name in [name for name in own if name.split(".")[-2] in joined]:
        kind, weights = name.split(".")[-2], own.pop(name)
        parts, sizes = zip(*joined[kind], strict=True)
        own |= {name.replace(kind, part): rows for part, rows in zip(parts, weights.split(sizes), strict=True)}
    for name in [name for name in own if ".q_proj." in name or ".k_proj." in name]:
        own[name] = own[name].unflatten(0, (-1, D))[:, ORDERS[architecture]].flatten(0, 1)
    other.load_state_dict(own)
    frequencies = model.model.rotary_emb.inv_freq
    still = torch.zeros(D // 2 - len(frequencies))
    other.model.rotary_emb.inv_freq = nn.Buffer(torch.cat([frequencies, still]), persistent=False)
    return other  # type: ignore[no-any-return]


def steps(model: PreTrainedModel, name: str, budget: float) -> list[Step]:
    with attached(model, small(name), budget=budget, calibration=CALIBRATION) as kv:
        return turn(kv, kv.cache(capacity=140), prompt(120), chunk=50)


@pytest.mark.parametrize("name", [*KNOW_ROTATIONS, "quest"])
@pytest.mark.parametrize("architecture", ORDERS)
def test_methods_read_a_model_as_they_read_one_that_rotates_whole_heads(architecture: str, name: str) -> None:
    """At a budget that leaves most tokens out."""
    model = tiny(architecture)
    for ours, theirs in zip(steps(model, name, 0.3), steps(twin(architecture), name, 0.3), strict=True):
        assert ours.attended == theirs.attended
        assert_close(ours.logits, theirs.logits, atol=1e-3, rtol=1e-3)
    assert (ours.logits - steps(model, "full", 1.0)[-1].logits).abs().max() > 0.1
