"""Every family of models: `generate` and Full are equal, methods run, and what only some of them have is right: layers
without rotation, mixtures of experts, a text part."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from harness.bench import decode
from harness.engine.attach import Attachment, attached
from harness.engine.engine import Engine
from harness.engine.hf import routed
from harness.jobs.alignment import shapes
from harness.models.base import ModelError
from harness.models.hub import HuggingFace
from kernels.dispatch import use_backend
from methods.base import AttnInput, KVLayer, LayerWorkload
from methods.full import Full
from methods.infinigen import InfiniGenRead
from tests import families
from tests.families import FAMILIES, METHODS, MORE, answers, attach, generated, method_of, model, prompts, source
from tests.harness.bench.test_decode import options
from tests.harness.jobs import test_forecast as forecast
from tests.quick import slow_if
from tests.tape import Tape
from tests.tiny import FURTHER, LATENT, prompt, tiny

EVERY = (FAMILIES | MORE).values()
each_family = pytest.mark.parametrize("family", slow_if(lambda family: family in MORE.values(), EVERY))
QUICK = ("snapkv", "quest", "kivi", "pqcache")  # one that evicts, selects, quantises, offloads: two on each family
PAIRS = {(family, name) for place, family in enumerate(FAMILIES.values()) for name in QUICK[place % 2 :: 2]}
MOVES = ("shadowkv", "infllm", "lm_infinite")  # they rotate keys back and forth
LENDS = ("infllm", "lm_infinite"), "other layers of this model read its keys and values"
REFUSED = {  # family -> methods, and why they are refused
    # it norms the keys that it has rotated, so that nobody can rotate them back
    "hunyuan_v1_dense": ((*MOVES, "streaming", "triattention"), "must know how the model rotates keys by position"),
    "gemma4": LENDS,
    "gemma3n_text": LENDS,
    "mimo_v2_flash": (("kivi",), "writes values as wide as keys"),
}
TEXT = "gemma3"


@pytest.mark.tokens
@each_family
@pytest.mark.parametrize("chunk", [None, 13])
def test_full_gives_generates_tokens(family: str, chunk: int | None) -> None:
    """Alone, in a batch of unequal prompts, and in transformers' own loop, of a model that was saved and loaded."""
    with attach(family, Full(), 1.0) as kv:
        alone = [
            Engine(kv, prefill_chunk=chunk).generate(ids, max_new_tokens=families.NEW).tokens[0] for ids in prompts()
        ]
        assert alone == answers(kv, prompts(), chunk) == generated(family)
        if chunk is None:
            assert families.by_loop(model(family), prompts()[0]) == generated(family)[0]
    assert torch.equal(model(family)(prompt(30)).logits, families.made(family)(prompt(30)).logits)


@pytest.mark.tokens
@pytest.mark.parametrize("pair", slow_if(lambda pair: pair not in PAIRS, product(EVERY, METHODS)), ids="-".join)
def test_a_method_runs_or_says_why_not(pair: tuple[str, str]) -> None:
    family, name = pair
    refused, why = REFUSED.get(family, ((), ""))
    if family in (*LATENT, "mistral4") and (reason := method_of(name).no_latents):
        refused, why = (name,), re.escape(reason)
    if name == "dsa" and family not in ("deepseek_v32", "glm_moe_dsa"):
        refused, why = (name,), "this model has none"
    if name in refused:
        with pytest.raises(ValueError, match=why):
            families.faults(family, name)
    else:
        assert not families.faults(family, name)


@pytest.mark.parametrize("family", ["glm4", "phi4", "gemma3", "smollm3"])
@torch.inference_mode()
def test_keys_that_were_rotated_back_and_forth_are_the_models_own(family: str) -> None:
    """ShadowKV with all ranks attends to the keys that the model gave, wherever it chooses."""
    calls: dict[int, list[tuple[AttnInput, Tensor]]] = {}

    def watched(layer: KVLayer, inner: Callable[[AttnInput], Tensor]) -> Callable[[AttnInput], Tensor]:
        def call(x: AttnInput) -> Tensor:
            calls.setdefault(layer.spec.index, []).append((x, inner(x)))
            return calls[layer.spec.index][-1][1]

        return call

    with attach(family, replace(method_of("shadowkv"), rank=1.0), 0.4) as kv:
        cache = kv.cache(capacity=84)
        for layer in cache.method_layers:
            layer.prefill, layer.decode = watched(layer, layer.prefill), watched(layer, layer.decode)  # type: ignore[method-assign]
        kv.model(prompt(80), past_key_values=cache)
        cache.seal()
        kv.model(prompt(1), past_key_values=cache)
    for layer in cache.method_layers:
        (text, _), (x, out) = calls[layer.spec.index]
        read = layer.read_positions()
        assert read is not None
        rows = read[..., None].expand(*read.shape, x.k.shape[3])
        k, v = (torch.cat([old.gather(2, rows), new], 2) for old, new in ((text.k, x.k), (text.v, x.v)))
        exact = scaled_dot_product_attention(x.q, k, v, scale=layer.spec.scale, enable_gqa=True)
        torch.testing.assert_close(out, exact, atol=1e-3, rtol=1e-3)


# layers without rotation


@cache
def still() -> Any:
    """A SmolLM3 whose layers rotate in turns: the first does not."""
    config = deepcopy(tiny("smollm3").config)
    config.no_rope_layers = [0, 1, 0, 1]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        return type(tiny("smollm3"))(config).eval()


@pytest.mark.parametrize("name", MOVES)
def test_layers_that_do_not_rotate_are_moved_by_nothing(name: str) -> None:
    """Each kind of layer has its own table of rotations, which the forecast counts."""
    method = method_of(name)
    with attached(still(), method, budget=0.4) as kv:
        out = Engine(kv).generate(prompt(60), max_new_tokens=8)
        cache = kv.cache(capacity=68)
        kv.model(prompt(60), past_key_values=cache)
        cache.seal()
        tables = [layer.policies[0].rope_table for layer in cache.layers]  # type: ignore[attr-defined]
        keys = torch.randn(1, 2, 60, 16)
        for table, turns in zip(tables, (0, 1, 0, 1), strict=True):
            assert torch.equal(table.unrotate(keys, torch.arange(60)), keys) != turns
        info = replace(source("smollm3").describe(), still_layers=(0, 2))
        cases = [LayerWorkload(spec, 60, 24, "device", 4, reserve=8) for spec in shapes(info)]
    assert [spec.rope_like for spec in kv.specs] == [spec.rope_like for spec in shapes(info)] == [0, 1, 0, 1]
    assert out.kv["device"] == pytest.approx(sum(method.cost(case).device_bytes for case in cases), rel=0.01)


@torch.inference_mode()
def test_infinigen_guesses_a_query_by_the_rotation_of_its_own_layer() -> None:
    """Given a layer's own input, but the angles of the layer before, the guess is the query itself."""
    seen: list[AttnInput] = []
    with attached(still(), method_of("infinigen"), budget=0.4, calibration=prompt(64)) as kv:
        cache = kv.cache(capacity=68)
        for layer in cache.layers:
            inner = layer.prefill
            layer.prefill = lambda x, inner=inner: (seen.append(x), inner(x))[1]  # type: ignore[method-assign, misc]
        kv.model(prompt(60), past_key_values=cache)
        cache.seal()
        for index in range(1, 4):
            read: InfiniGenRead = cache.layers[index].policies[0]  # type: ignore[attr-defined]
            before = replace(seen[index - 1], hidden=seen[index].hidden)
            torch.testing.assert_close(read.guessed_query(before), seen[index].q)


@pytest.mark.tokens
@pytest.mark.parametrize("name", ["full", "infinigen", *MOVES])
def test_blocks_and_captured_steps_leave_layers_as_they_are_that_do_not_rotate(name: str) -> None:
    answered = []
    with attached(still(), method_of(name), budget=0.4, calibration=prompt(64)) as kv, use_backend("torch"):
        for graphs in (None, None, Tape()):
            engine = Engine(kv, graphs=graphs)
            assert engine.plain_reason is None
            engine.forward = engine.forward if answered else None  # first by the model's own modules
            out = engine.generate(prompts()[0], max_new_tokens=families.NEW)
            answered.append([out.tokens[0], *families.batch_of(engine, prompts())])
    assert out.capture_s is not None
    assert answered[0] == answered[1] == answered[2]
    assert answered[0][0] == answered[0][1]


# mixtures of experts


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("chunk", [None, 700])
def test_the_peak_of_experts_is_what_was_forecast(family: str, chunk: int | None) -> None:
    info = source(family).describe()
    assert info.chosen_experts == 2
    assert info.inner_size == (FURTHER.get(family) or {}).get("moe_intermediate_size", 160)
    forecast.assert_nearly(tiny(family), info, chunk)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_floor_of_a_step_counts_the_experts_of_one_token(family: str) -> None:
    kv = Attachment(tiny(family), Full())
    with routed(kv.model):
        decoding = decode.Decoding(kv, prompt(50), options())
        decoding.last = []
    weights = dict(kv.model.named_parameters())
    count = {"qwen3_moe": 6, "gpt_oss": 4}[family]
    read = sum(x.nbytes * 2 // count if ".experts." in name else x.nbytes for name, x in weights.items())
    assert decode.floor_s(decoding, 1.0) == pytest.approx((read - weights["model.embed_tokens.weight"].nbytes) / 1e9)


# the text part of a model of texts and images


def edited(folder: Path, **text: Any) -> HuggingFace:
    """The model, with other words about its text part; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    both = config["text_config"] | text
    config["text_config"] = {key: value for key, value in both.items() if value is not None}
    file.write_text(json.dumps(config | {"eos_token_id": [1, 106]}))
    return HuggingFace(str(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in source(TEXT).folder().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_a_text_part_is_described_as_what_runs(folder: Path) -> None:
    changed, plain = edited(folder), source("gemma3_text").describe()
    info, loaded = changed.describe(), changed.load("fp32", "cpu")
    assert info.architecture == type(loaded.model).__name__ == "Gemma3ForCausalLM"
    assert info.num_parameters == sum(x.numel() for x in loaded.model.parameters())
    assert (info.window, info.layer_windows, info.dtype) == (4096, plain.layer_windows, "fp32")
    assert info.kv_bytes("bf16", 100) == plain.kv_bytes("bf16", 100)
    assert {1, 106} <= set(loaded.eos_ids)


def test_the_first_releases_layout_gives_the_same(folder: Path) -> None:
    """Other names, bases of the rotation left out, as the checkpoints of Gemma 3 have it."""
    file = folder / "model.safetensors"
    names = {r"^model\.language_model\.": "language_model.model.", r"^model\.(vision_tower|multi_modal)": r"\1"}
    tensors = load_file(file)
    for ours, theirs in names.items():
        tensors = {re.sub(ours, theirs, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, {"format": "pt"})
    scaled = {"factor": 8.0, "rope_type": "linear"}
    loaded = edited(folder, rope_parameters=None, rope_scaling=scaled, layer_types=None).load("fp32", "cpu").model
    kinds = loaded.config.rope_parameters
    assert kinds["full_attention"] == scaled | {"rope_theta": 1e6}
    assert kinds["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert all(torch.equal(x, model(TEXT).state_dict()[name]) for name, x in loaded.state_dict().items())


def test_a_text_part_is_held_against_its_own_config(folder: Path) -> None:
    with pytest.raises(ModelError, match="50"):
        edited(folder, attn_logit_softcapping=50.0).describe()
    with pytest.raises(ModelError, match=r"lacks model\.layers\.6\."):
        edited(folder, attn_logit_softcapping=None, num_hidden_layers=7, layer_types=None).load("fp32", "cpu")
