"""Models that rotate a part of each head, or neighbouring channels together: what methods make of their keys."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from harness.engine.attach import attached, observer
from harness.engine.cache import UnsupportedError
from harness.engine.hf import channel_pairing, layer_specs
from harness.engine.pairing import Angles, Pairing
from kernels.rope import halves, rotate, unrotate
from methods.full import Full
from tests.methods.test_contract import Step, small, turn
from tests.tiny import BORDER, SHAPE, by_length, fresh, prompt, tiny

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
    config = AutoConfig.for_model(architecture, **SHAPE) if architecture in ("cohere", "stablelm") else None
    model = tiny(architecture) if config is None else AutoModelForCausalLM.from_config(config)
    assert channel_pairing(model) == pairing
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
    pairing = channel_pairing(model)
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
    config = AutoConfig.for_model("qwen2", **SHAPE, rms_norm_eps=model.config.rms_norm_eps)
    other: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
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


def test_neighbours_become_halves() -> None:
    assert halves(torch.arange(10), 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 7, 8, 9]
