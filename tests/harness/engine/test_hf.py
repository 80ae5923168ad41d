"""The binding to transformers and the forward by blocks: equal to the model, and gone afterwards."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from harness.engine.attach import Attachment, attached
from harness.engine.cache import UnsupportedError
from harness.engine.engine import Engine
from harness.engine.forward import BlockForward, ForwardError
from harness.engine.hf import NAME, layer_specs, routed
from harness.engine.joined import join_weights
from kernels.rope import rotate
from methods.full import Full
from methods.infinigen import InfiniGen
from tests.quick import mostly_slow
from tests.tiny import ARCHITECTURES, BY_BLOCKS, SHAPE, prompt, tiny

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


@pytest.mark.parametrize("architecture", BY_BLOCKS)
def test_logits_are_those_of_the_model_s_own_forward(architecture: str) -> None:
    model, ids = tiny(architecture), prompt(50, batch=2)
    with attached(model, Full()) as kv, torch.inference_mode():
        forward, caches = BlockForward(model), [kv.cache(capacity=60, batch=2) for _ in range(2)]

        def compare(tokens: Tensor) -> None:
            ours = forward(tokens, caches[0])
            theirs = model(tokens, past_key_values=caches[1], use_cache=True).logits[:, -1]
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

        for chunk in ids.split(30, dim=1):
            compare(chunk)
        for cache in caches:
            cache.seal()
        for token in prompt(8, batch=2, seed=1).split(1, dim=1):
            compare(token)
        assert caches[0].num_tokens == caches[1].num_tokens == 58


def test_a_hook_or_an_adapter_is_not_passed_over() -> None:
    model = deepcopy(tiny("llama"))
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(ForwardError, match=r"model\.layers\.1\.mlp"):
        BlockForward(model)
    handle.remove()
    BlockForward(model)

    class Adapted(nn.Linear):
        """As an adapter library puts in a layer's place."""

    plain = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = Adapted(128, 160, bias=False)
    with pytest.raises(ForwardError, match=r"model\.layers\.0\.mlp\.up_proj is"):
        BlockForward(model)
    model.model.layers[0].mlp.up_proj = plain
    model.model.norm.forward = lambda x: x
    with pytest.raises(ForwardError, match=r"forward of model\.norm"):
        BlockForward(model)


def test_a_model_that_was_converted_later_is_refused() -> None:
    model = deepcopy(tiny("llama"))
    with attached(model, Full()) as kv:
        engine = Engine(kv)
        model.to(torch.bfloat16)
        with pytest.raises(UnsupportedError, match="new Engine"):
            engine.generate(prompt(30), max_new_tokens=2)


@pytest.mark.tokens
def test_a_refused_model_runs_its_own_forward() -> None:
    plain, hooked = tiny("qwen2"), deepcopy(tiny("qwen2"))
    seen = []
    hooked.model.norm.register_forward_hook(lambda *_: seen.append(1))
    tokens = []
    for model in (plain, hooked):
        with attached(model, Full()) as kv:
            engine = Engine(kv)
            assert (engine.plain_reason is None) == (model is plain)
            tokens.append(engine.generate(prompt(30), max_new_tokens=6).tokens)
    assert tokens[0] == tokens[1]
    assert len(seen) == 6  # the prompt and five tokens


def join_inputs(model: PreTrainedModel) -> list[tuple[Tensor | None, Tensor | None]]:
    """Joins the weights as on a GPU. -> of each layer what q, k and v are slices of, and gate and up, if anything"""
    weights = pytest.importorskip("kernels.gpu.weights")
    join_weights(model.model.layers)
    pairs = [weights.joint(block) for block in BlockForward(model).blocks]
    return [tuple(None if part is None else part.weight for part in pair) for pair in pairs]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("architecture", BY_BLOCKS)
def test_joint_weights_change_nothing_but_where_they_lie(architecture: str, inference: bool, tmp_path: Path) -> None:
    plain, model, ids = tiny(architecture), deepcopy(tiny(architecture)), prompt(20)
    before = dict(model.named_parameters())
    with torch.inference_mode(inference):
        joined = join_inputs(model)
        places = [module.data_ptr() for module in model.parameters()]
        assert all(part is not None for pair in joined for part in pair)
        join_weights(model.model.layers)  # as a second engine of the model does
        assert places == [module.data_ptr() for module in model.parameters()]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in plain.state_dict().items())
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in model.parameters()}
    assert sum(storages.values()) == sum(x.nbytes for x in plain.parameters())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in plain.state_dict().items())


def test_on_the_cpu_weights_stay_where_they_lie() -> None:
    model = deepcopy(tiny("llama"))
    places = [parameter.data_ptr() for parameter in model.parameters()]
    BlockForward(model)
    assert places == [parameter.data_ptr() for parameter in model.parameters()]


def test_weights_that_cannot_be_joined_stay_apart() -> None:
    """One of another dtype; one whose memory others use, which would not become free."""
    model = deepcopy(tiny("llama"))
    first, second, third = model.model.layers
    first.self_attn.k_proj.to(torch.bfloat16)
    second.mlp.up_proj.weight.data = torch.zeros(200, 128)[:160]
    third.mlp.gate_proj.weight = third.mlp.up_proj.weight
    assert [[part is not None for part in pair] for pair in join_inputs(model)] == [
        [False, True],
        [True, False],
        [True, False],
    ]
