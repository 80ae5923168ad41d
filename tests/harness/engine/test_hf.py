"""The binding to transformers and the forward by blocks: equal to the model, and gone afterwards."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness import Engine, attached
from harness.engine.cache import UnsupportedError
from harness.engine.forward import BlockForward, ForwardError, join_weights
from harness.engine.hf import NAME, layer_specs
from kernels.rope import rotate
from methods.full import Full
from tests.tiny import ARCHITECTURES, BY_BLOCKS, PARTLY, prompt, tiny

NEW = 16


def generated(model: PreTrainedModel, ids: torch.Tensor, **more: object) -> list[list[int]]:
    """Greedy tokens of transformers' own loop, whatever they are: none ends the answer."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=-1, **more
    )
    return out[:, ids.shape[1] :].tolist()


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


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *PARTLY])
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


@pytest.mark.parametrize("architecture", [*BY_BLOCKS, "phi4", "glm"])
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

    with attached(model, Full()) as kv:  # which runs its own forward then
        assert Engine(kv).plain_reason is None
        own, ids = Engine(kv).generate(prompt(30), max_new_tokens=6).tokens, prompt(30)
        seen: list[int] = []
        norm = model.model.norm.register_forward_hook(lambda *_: seen.append(1))
        assert Engine(kv).generate(ids, max_new_tokens=6).tokens == own
        assert len(seen) == 6  # the prompt and five tokens
        norm.remove()
    plain = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = Adapted(128, 160, bias=False)
    with pytest.raises(ForwardError, match=r"model\.layers\.0\.mlp\.up_proj is"):
        BlockForward(model)
    model.model.layers[0].mlp.up_proj = plain
    model.model.norm.forward = lambda x: x
    with pytest.raises(ForwardError, match=r"forward of model\.norm"):
        BlockForward(model)


def adapt(model: PreTrainedModel, target: str = "q_proj") -> None:
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        model.add_adapter(peft.LoraConfig(r=4, target_modules=[target], init_lora_weights=False))


def replace_weights(model: PreTrainedModel) -> None:
    model.load_state_dict({name: x.flip(0) for name, x in model.state_dict().items()}, assign=True)


def attend_apart(model: PreTrainedModel) -> None:
    attention = model.model.layers[1].self_attn
    attention.config = deepcopy(attention.config)
    attention.config._attn_implementation = "sdpa"


CHANGES: dict[str, Callable[[PreTrainedModel], object]] = {
    "set": lambda model: model.set_attn_implementation("sdpa"),
    "by hand": lambda model: setattr(model.config, "_attn_implementation", "eager"),
    "one layer": attend_apart,
    "adapter": adapt,
    "adapter of the MLP": lambda model: adapt(model, "up_proj"),
    "dtype": lambda model: model.to(torch.bfloat16),
    "load": replace_weights,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_inside_the_block_is_refused(change: str) -> None:
    """Whoever runs it: a loop with a cache of its own, with one that has read a prompt, or an engine."""
    model, ids, of_attention = deepcopy(tiny("llama")), prompt(30), change in ("set", "by hand", "one layer")
    with attached(model, Full()) as kv:
        engine, used = Engine(kv), kv.cache(capacity=99)
        model(ids, past_key_values=used)
        CHANGES[change](model)
        says = "set_attn_implementation outside" if of_attention else "attach the method again"
        for cache in (None, used):
            with pytest.raises(UnsupportedError, match=says):
                model(ids, past_key_values=cache)
        if not of_attention:  # an engine that runs by blocks does not ask for transformers' attention
            with pytest.raises(UnsupportedError, match=says):
                engine.generate(ids, max_new_tokens=2)
    assert model.config._attn_implementation == "sdpa"


def test_an_engine_refuses_weights_that_lie_elsewhere_than_when_it_was_made() -> None:
    model = deepcopy(tiny("llama"))
    with attached(model, Full()) as kv:
        engine, weight = Engine(kv), model.model.layers[1].mlp.up_proj.weight
        weight.data = weight.data.clone()
        with pytest.raises(UnsupportedError, match="new Engine"):
            engine.generate(prompt(30), max_new_tokens=2)


def join_inputs(model: PreTrainedModel) -> list[tuple[Tensor | None, Tensor | None]]:
    """Joins the weights as on a GPU. -> of each layer what q, k and v are slices of, and gate and up, if anything"""
    weights = pytest.importorskip("kernels.gpu.weights")
    join_weights(model.model.layers)
    pairs = [weights.joint(block) for block in BlockForward(model).blocks]
    return [tuple(None if part is None else part.weight for part in pair) for pair in pairs]


@pytest.mark.parametrize("architecture", BY_BLOCKS)
def test_joint_weights_change_nothing_but_where_they_lie(architecture: str) -> None:
    plain, model, ids = tiny(architecture), deepcopy(tiny(architecture)), prompt(20)
    before = dict(model.named_parameters())
    with torch.inference_mode():
        joined = join_inputs(model)
        places = [module.data_ptr() for module in model.parameters()]
        assert all(part is not None for pair in joined for part in pair)
        join_weights(model.model.layers)  # as a second engine of the model does
        assert places == [module.data_ptr() for module in model.parameters()]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in plain.state_dict().items())
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)
