from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from harness.attach import attached
from harness.engine import Engine
from harness.step import DecodeStep, StepError
from methods.full import Full
from tests.tiny import ARCHITECTURES, prompt, tiny


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_step_gives_the_logits_of_the_model_s_own_forward(architecture: str) -> None:
    model, ids = tiny(architecture), prompt(50, batch=2)
    with attached(model, Full()) as kv, torch.inference_mode():
        step, caches = DecodeStep(model), [kv.cache(capacity=60, batch=2) for _ in range(2)]
        for cache in caches:
            model(ids, past_key_values=cache, use_cache=True)
            cache.seal()
        for token in prompt(8, batch=2, seed=1).split(1, dim=1):
            ours = step(token, caches[0])
            theirs = model(token, past_key_values=caches[1], use_cache=True).logits[:, -1]
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert caches[0].num_tokens == caches[1].num_tokens == 58


def test_a_hook_or_an_adapter_is_not_passed_over() -> None:
    model = deepcopy(tiny("llama"))
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(StepError, match=r"model\.layers\.1\.mlp"):
        DecodeStep(model)
    handle.remove()
    DecodeStep(model)

    class Adapted(nn.Linear):
        """As an adapter library puts in a layer's place."""

    model.model.layers[0].mlp.up_proj = Adapted(128, 160, bias=False)
    with pytest.raises(StepError, match="Adapted"):
        DecodeStep(model)


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
    assert len(seen) == 6
