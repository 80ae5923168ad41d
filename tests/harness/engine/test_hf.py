"""The binding to transformers: equal to `generate`, refusing what it would get wrong, and gone afterwards."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from harness.engine.attach import Attachment, attached
from harness.engine.cache import UnsupportedError
from harness.engine.engine import Engine
from harness.engine.hf import NAME, layer_specs, routed
from kernels.rope import rotate
from methods.full import Full
from methods.infinigen import InfiniGen
from tests.quick import mostly_slow
from tests.tiny import ARCHITECTURES, SHAPE, prompt, tiny

NEW = 16


def generated(model: PreTrainedModel, ids: torch.Tensor, **more: object) -> list[list[int]]:
    """Greedy tokens of transformers' own loop, whatever they are: none ends the answer."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=-1, **more
    )
    return out[:, ids.shape[1] :].tolist()


@pytest.mark.tokens
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("chunk", mostly_slow([None, 1, 13], 13))
def test_full_gives_generates_tokens(architecture: str, chunk: int | None) -> None:
    model, ids = tiny(architecture), prompt(61, batch=2)
    with attached(model, Full()) as kv:
        ours = Engine(kv, prefill_chunk=chunk).generate(ids, max_new_tokens=NEW).tokens
    assert ours == generated(model, ids)


@pytest.mark.tokens
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_users_own_generate_runs_through_the_method(architecture: str) -> None:
    model, ids = tiny(architecture), prompt(40)
    with attached(model, Full()) as kv:
        cache = kv.cache(capacity=40 + NEW)
        through = generated(model, ids, past_key_values=cache)
    assert cache.sealed
    assert cache.method_layers[0].attended == (40, NEW - 1)
    assert through == generated(model, ids)


@pytest.mark.tokens
def test_the_model_is_restored_also_after_an_exception() -> None:
    model, ids = tiny("llama"), prompt(20)
    before = generated(model, ids)
    with pytest.raises(ZeroDivisionError), attached(model, Full()):
        assert model.config._attn_implementation == NAME
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)
    assert generated(model, ids) == before


def test_a_method_that_fails_to_start_leaves_the_model_alone() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="keeps nothing"), attached(model, Full(), placement="host"):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_a_method_prepares_itself_on_a_model_that_is_routed_already() -> None:
    method, text = InfiniGen(dense_layers=(0,), calibration_tokens=32), prompt(32)
    alone = Attachment(tiny("llama"), method, 0.5, calibration=text).prepared
    model = tiny("llama")
    with routed(model):
        inside = Attachment(model, method, 0.5, calibration=text).prepared
        assert model.config._attn_implementation == NAME
    assert all(torch.equal(*pair) for pair in zip(alone, inside, strict=True))  # type: ignore[call-overload]


def test_refusals() -> None:
    model, ids = tiny("llama"), prompt(12)
    with attached(model, Full()) as kv:

        def forward(**more: object) -> None:
            model(ids, past_key_values=kv.cache(capacity=20), **more)

        padded = torch.ones_like(ids)
        padded[0, 0] = 0
        with pytest.raises(UnsupportedError, match="mask pads some"):
            forward(attention_mask=padded)
        with pytest.raises(UnsupportedError, match="custom attention mask"):
            forward(attention_mask=torch.zeros(1, 1, 12, 12))
        with pytest.raises(UnsupportedError, match="num_logits_to_keep"):
            forward(num_logits_to_keep=1)
        with pytest.raises(UnsupportedError, match="DynamicCache"):
            model.model(ids, past_key_values=DynamicCache())
        with pytest.raises(UnsupportedError, match="attached already"), routed(model):
            pass
        filled = kv.cache(capacity=20)
        model(ids, past_key_values=filled)
        with pytest.raises(ValueError, match="capacity=20"):
            model(ids, past_key_values=filled)
        with pytest.raises(UnsupportedError, match="Beam search"):
            generated(model, ids, past_key_values=kv.cache(capacity=40, batch=2), num_beams=2)
        with pytest.raises(ValueError, match="batch=1"):
            generated(model, ids, past_key_values=kv.cache(capacity=40), num_beams=2)
        cache = kv.cache(capacity=30)
    with pytest.raises(UnsupportedError, match="not attached"):
        model(ids, past_key_values=cache)


def test_soft_caps_are_refused_by_name() -> None:
    config = AutoConfig.for_model("gemma2", **SHAPE, head_dim=16, sliding_window=4096)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with attached(model, Full()) as kv, pytest.raises(UnsupportedError, match="softcap"):
        Engine(kv).generate(prompt(8), max_new_tokens=2)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_project_query_and_rope_rebuild_the_query_that_attention_sees(architecture: str) -> None:
    model, ids = tiny(architecture), prompt(9)
    spec, seen = [spec for spec in layer_specs(model) if spec.window is None][-1], []

    class Watching(Full):
        def start(self, specs, cache):  # type: ignore[no-untyped-def]
            layers = super().start(specs, cache)
            inner = layers[-1].prefill
            layers[-1].prefill = lambda x: (seen.append(x), inner(x))[1]  # type: ignore[method-assign]
            return layers

    with attached(model, Watching()) as kv, torch.no_grad():
        model(ids, past_key_values=kv.cache(capacity=9))
        (x,) = seen
        rebuilt = rotate(spec.project_query(x.hidden), *spec.rope(torch.arange(9)))
    assert torch.allclose(rebuilt, x.q, atol=1e-5)
