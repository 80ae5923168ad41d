"""Rotations taken out of keys and put in at other positions, held against transformers' own forward there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from harness.cachedattention.turns.caches import CachesBetweenTurns, DevicePrefix
from harness.cachedattention.turns.conversation import Conversation
from harness.cachedattention.turns.truncation import Rotation, RotationError
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.hf import channel_pairings, layer_specs
from kernels.rope import rotate
from methods.full import Full
from tests.harness.cachedattention.turns.test_caches import TIERS, stored
from tests.tiny import ARCHITECTURES, BORDER, PARTLY, by_length, fresh, prompt, tiny

TOKENS, FAR = 20, 700  # fewer than a sliding window; positions far from the first ones
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "attention_factor": 1.4,
    "original_max_position_embeddings": BORDER,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "rope_theta": 10000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": BORDER,
}  # fmt: skip
SCALED = {"linear": LINEAR, "yarn": YARN, "llama3": LLAMA3}
BY_REACH = ("dynamic", "longrope")


def keys_at(model: PreTrainedModel, positions: Tensor) -> list[Tensor]:
    """Of every layer, as transformers caches them. Attention sees distances alone, so only the rotation differs."""
    with torch.no_grad():
        out = model(prompt(len(positions)), position_ids=positions[None], use_cache=True)
    return [channel_pairings(model)[0].in_halves(layer.keys) for layer in out.past_key_values.layers]


def rotations(model: PreTrainedModel) -> list[Rotation]:
    return [Rotation(spec.rope, model.dtype) for spec in layer_specs(model)]


MODELS = [*(pytest.param(lambda a=a: tiny(a), id=a) for a in (*ARCHITECTURES, *PARTLY, "smollm3"))]
MODELS += [
    pytest.param(lambda rope=rope: fresh("llama", rope_parameters=rope), id=name) for name, rope in SCALED.items()
]
MODELS += [pytest.param(lambda: fresh("glm", rope_parameters=YARN | {"partial_rotary_factor": 0.5}), id="glm-yarn")]


@pytest.mark.parametrize("make", MODELS)
def test_moved_keys_are_the_models_at_their_new_positions(make: Any) -> None:
    model, here, there = make(), torch.arange(TOKENS), torch.arange(FAR, FAR + TOKENS)
    turns = getattr(model.config, "no_rope_layers", [True] * model.config.num_hidden_layers)  # SmolLM3's: which rotate
    layers = zip(turns, rotations(model), keys_at(model, here), keys_at(model, there), strict=True)
    for turning, rotation, keys, wanted in layers:
        assert torch.allclose(keys, wanted, atol=0.1) != turning
        assert_close(rotation.move(keys, here, there), wanted, atol=2e-4, rtol=1e-4)
        assert_close(rotation.move(wanted, there, here), keys, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BY_REACH)
def test_angles_that_depend_on_the_text_follow_its_reach(name: str) -> None:
    """Keys of a short forward become those of a long one, whatever the module was asked meanwhile."""
    model = by_length("llama", name)
    [rotation, *_], reach = rotations(model), 3 * BORDER
    here, there = torch.arange(TOKENS), torch.arange(reach - TOKENS, reach)
    short, long = keys_at(model, here)[0], keys_at(model, there)[0]
    off = rotation.off(short, here)
    assert_close(rotation.off(long, there), off, atol=2e-4, rtol=1e-4)
    assert_close(rotation.on(off, there), long, atol=2e-4, rtol=1e-4)
    cos, sin = model.model.rotary_emb(off, here[None])
    assert_close(rotation.on(off, here), rotate(off, cos, sin), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BY_REACH)
def test_texts_that_outgrow_their_angles_are_refused(name: str) -> None:
    model = by_length("llama", name)
    [rotation, *_] = rotations(model)
    rotation.check(BORDER)
    with pytest.raises(RotationError):
        rotation.check(BORDER + 1)
    with pytest.raises(RotationError):
        rotation.check(3 * BORDER)
    for rope in SCALED.values():
        rotations(fresh("llama", rope_parameters=rope))[0].check(100_000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_turned_in_fp32(dtype: torch.dtype) -> None:
    """Stored in the model's dtype, a key that goes back to its place is off by a rounding; in fp32, by none."""
    rotation = Rotation(layer_specs(tiny("llama"))[0].rope, dtype)
    keys, places = torch.randn(1, 2, TOKENS, 16).to(dtype), torch.arange(FAR, FAR + TOKENS)
    off = rotation.off(keys, places)
    assert off.dtype == torch.float32
    assert torch.equal(rotation.on(off, places), keys)
    again = rotation.on(off.to(dtype), places).float() - keys.float()
    assert 0 < again.abs().max() < 4 * torch.finfo(dtype).eps * keys.float().abs().max()


# Where the model rotates by the length of the text, histories are kept and change no answer.

NEW, TURNS, CAPACITY = 6, (20, 12, 14, 8, 10), 160  # crosses BORDER between turns or within an answer
CASES = [("phi3", "longrope"), ("llama", "longrope"), ("llama", "dynamic")]
each_model = pytest.mark.parametrize(("architecture", "kind"), CASES)


@dataclass
class Talk:
    """What a conversation said, what it reused in each turn, and which histories were outgrown."""

    said: list[list[int]] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    outgrown: list[bool] = field(default_factory=list)
    recomputed: int = 0


@contextmanager
def histories(kv: Attachment, where: str) -> Iterator[CachesBetweenTurns]:
    """`where`: recompute, device_prefix or a tier of a store."""
    kinds: dict[str, Callable[[], CachesBetweenTurns]] = {
        "recompute": lambda: CachesBetweenTurns(lambda capacity: kv.start(KVCache, capacity=capacity)),
        "device_prefix": lambda: DevicePrefix(lambda capacity: kv.start(KVCache, capacity=capacity)),
    }
    made = kinds[where]() if where in kinds else stored(kv, **TIERS[where])
    yield made
    made.close()


def talked(
    kv: Attachment, where: str, turns: tuple[int, ...] = TURNS, capacity: int = CAPACITY, by_token: bool = False
) -> Talk:
    engine, talk = Engine(kv, prefill_chunk=16), Talk()
    with histories(kv, where) as kept:
        one = Conversation(kept, "alice", capacity, len(turns), by_token=by_token)
        for number, length in enumerate(turns):
            one.ask(prompt(length, seed=number)[0].tolist())
            one.resume()
            talk.reused.append(one.found.reused)
            talk.outgrown.append(one.found.outgrown)
            logits = one.compute(lambda cache, ids: engine.prefill(cache, torch.tensor([list(ids)])))
            rest = torch.tensor([one.unread], dtype=torch.long)
            made = engine.complete(one.found.cache, logits, rest, began=0.0, max_new_tokens=NEW)
            talk.said.append(made.tokens[0])
            talk.recomputed += made.recomputed
            one.answered(made.tokens[0], "length")
            one.save()
    return talk


@each_model
@pytest.mark.parametrize("where", ["device_prefix", "host"])
@pytest.mark.parametrize("turns", [TURNS, (40, 12, 20, 8), (30, 23, 8, 8)], ids=["between", "jump", "within"])
def test_kept_histories_change_no_answer(architecture: str, kind: str, where: str, turns: tuple[int, ...]) -> None:
    """They are reused while the text is rotated as they are, and computed anew where it no longer is."""
    with attached(by_length(architecture, kind), Full()) as kv:
        talk, wanted = talked(kv, where, turns), talked(kv, "recompute", turns)
    assert talk.said == wanted.said
    assert talk.reused[1] > 0
    if kind == "longrope":
        assert talk.reused[-1] > 0
        assert sum(talk.outgrown) + (talk.recomputed > 0) >= 1
        assert sum(talk.outgrown) <= 1
    else:
        assert not talk.reused[-1]
        assert talk.outgrown[-1]
