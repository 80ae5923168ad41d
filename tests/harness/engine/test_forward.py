from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from harness.engine.attach import attached
from harness.engine.engine import Engine
from harness.engine.forward import BlockForward, ForwardError
from harness.engine.hf import UnsupportedError
from methods.full import Full
from tests.tiny import BY_BLOCKS, prompt, tiny


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
    with pytest.raises(ForwardError, match=r"model\.layers\.0\.mlp\.up_proj is a Adapted"):
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
        with pytest.raises(UnsupportedError, match="make a new Engine"):
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
