"""Models of classes that nobody listed: what runs, what is refused and why, and the comparison with generate."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WHOLES

from harness import Engine, attached, evaluate
from harness.config.settings import Results, Settings
from harness.engine.cache import UnsupportedError
from harness.engine.hf import NAME, layer_specs
from harness.jobs import model_check
from harness.models.base import ModelError
from harness.models.hub import HuggingFace
from harness.models.layer_kinds import layer_kinds
from harness.models.probe import NAME as PROBE
from harness.models.probe import ProbeError, on_meta, probe
from harness.reports.compare import comparisons
from harness.reports.conditions import conditions
from methods.base import Method
from methods.base.request import QUERIES, ROTATION
from methods.full import Full
from methods.infinigen import InfiniGen, InfiniGenRead
from methods.pqcache import PQCache
from methods.shadowkv import ShadowKV
from methods.snapkv import SnapKV
from methods.streaming import Streaming
from tests.families import batch_of
from tests.fast import niah
from tests.tiny import SHAPE, fresh, prompt, tiny
from tests.tiny import saved as saved_in

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SLIDES = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
UNLISTED: dict[str, dict[str, Any]] = {
    "olmo2": {},  # norms of whole projections
    "cohere": {},  # neighbouring channels turn together
    "cohere2": SLIDES,  # the layer that sees all does not rotate
    "starcoder2": {"sliding_window": None},
    "granite": {"attention_multiplier": 0.2},
    "glm4_moe": EXPERTS | {"head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "nanochat": {},
    "olmo3": SLIDES,  # a rotation per kind of layer
    "olmo": {"clip_qkv": 0.5},  # cuts off what its projections give
    "laguna": EXPERTS | {"head_dim": 16, "num_attention_heads_per_layer": [4] * 3},  # its config says 8 query heads
    "afmoe": EXPERTS | SLIDES | {"head_dim": 16, "num_dense_layers": 1},  # gates what attention gives
    "granite4": {},  # of a class for hybrids, without a layer that keeps a state
}


LENT = {"internlm3": {"head_dim": 16}, "iquestcoder": {"head_dim": 16}}  # which are Llama in transformers


def model_of(kind: str, **changes: Any) -> PreTrainedModel:
    return fresh(kind, **(UNLISTED | LENT)[kind] | changes)


def answered(model: PreTrainedModel, ids: torch.Tensor, method: Method, chunk: int | None = None) -> list[int]:
    with attached(model, method, budget=1.0) as kv:
        return Engine(kv, prefill_chunk=chunk).generate(ids, max_new_tokens=6).tokens[0]


@pytest.mark.parametrize("kind", UNLISTED)
def test_an_unlisted_class_gives_the_tokens_of_generate(kind: str) -> None:
    model, ids = model_of(kind, eos_token_id=None), prompt(70)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, 70:].tolist()
    for method, chunk in ((Full(), None), (Full(), 32), (PQCache(), 32), (SnapKV(), None)):
        assert answered(model, ids, method, chunk) == expected, type(method).__name__


def test_what_methods_are_told_is_tried_and_only_those_that_need_what_is_unknown_are_refused() -> None:
    """NanoChat turns keys the other way round, OLMo clips queries. OLMo 2's one norm of all heads is known."""
    unknown = {kind: {spec.unknown for spec in layer_specs(model_of(kind))} for kind in UNLISTED}
    lacking = {"olmo": (QUERIES,), "nanochat": (ROTATION, QUERIES)}
    assert unknown == {kind: {lacking.get(kind, ())} for kind in UNLISTED}
    still = [spec.rope(torch.tensor([9]))[1].abs().max() == 0 for spec in layer_specs(model_of("cohere2"))]
    assert still == [False, True, False]
    turned = ("nanochat", Streaming(positions="cache"), ROTATION)
    for kind, method, what in (("nanochat", ShadowKV(), ROTATION), turned, ("olmo", InfiniGen(), QUERIES)):
        with pytest.raises(ValueError, match=f"{type(method).__name__} must know {what}"):
            answered(model_of(kind), prompt(30), method)


SCALES = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
FINISHED = {  # Hunyuan norms what it has rotated, Ministral 3 scales queries by their position
    "hunyuan_v1_dense": {"head_dim": 16},
    "ministral3": {"head_dim": 16, "rope_parameters": SCALES | {"llama_4_scaling_beta": 0.3}},
}


@pytest.mark.tokens
@pytest.mark.parametrize("kind", FINISHED)
def test_queries_that_change_after_their_rotation_are_guessed(kind: str) -> None:
    """Given a layer's own input, InfiniGen's guess is the query itself; a press would leave the change out."""
    model, ids, calibration = fresh(kind, **FINISHED[kind], eos_token_id=None), prompt(70), prompt(64, seed=9)
    for layer in model.model.layers:
        for name, weight in layer.self_attn.named_parameters():
            if "layernorm" in name:
                weight.data.uniform_(0.3, 3.0)
    method = InfiniGen(calibration_tokens=64, dense_layers=(0,))
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, 70:].tolist()
    with attached(model, method, budget=1.0, calibration=calibration) as kv:
        assert Engine(kv).generate(ids, max_new_tokens=6).tokens[0] == expected
        assert QUERIES not in kv.specs[0].unknown
    with attached(model, method, budget=0.4, calibration=calibration) as kv:
        alone = [Engine(kv).generate(text, max_new_tokens=8).tokens[0] for text in (ids, prompt(50))]
        assert batch_of(Engine(kv), (ids, prompt(50))) == alone
        cache, seen = kv.cache(capacity=80), list[Any]()
        for layer in cache.layers:
            inner = layer.prefill
            layer.prefill = lambda x, inner=inner: (seen.append(x), inner(x))[1]  # type: ignore[method-assign, misc]
        kv.model(ids, past_key_values=cache)
        cache.seal()
        for index in (1, 2):
            read: InfiniGenRead = cache.layers[index].policies[0]  # type: ignore[attr-defined]
            guessed = read.guessed_query(replace(seen[index - 1], hidden=seen[index].hidden))
            torch.testing.assert_close(guessed, seen[index].q)


def test_a_class_is_tried_again_with_other_weights() -> None:
    """OLMo clips queries, which shows only where they are large."""
    model = model_of("olmo")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(1e-4)
    with attached(model, Full()) as kv:
        assert {spec.unknown for spec in kv.specs} == {()}
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(1e4)
    with attached(model, Full()) as kv:
        assert {spec.unknown for spec in kv.specs} == {(QUERIES,)}


LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}


def test_a_model_of_ones_own_is_refused_by_what_it_does_and_never_runs_by_blocks() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 4.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "short_mscale": 1.2, "long_mscale": 1.3}
    uneven = {"head_dim": 16, "num_attention_heads_per_layer": [4, 8, 4]}
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("gemma2", {"head_dim": 16}, "Gemma2ForCausalLM caps its attention logits"),
        ("gpt_neox", {}, "GPTNeoXForCausalLM is not built of"),
        ("bloom", {"n_head": 8}, "BloomForCausalLM places tokens by a bias"),
        ("mpt", {"n_heads": 8}, "MptForCausalLM places tokens by a bias"),
        ("recurrent_gemma", {"lru_width": 128}, "RecurrentGemmaForCausalLM (keeps states in another|is not built)"),
        ("llama4_text", EXPERTS | {"attention_chunk_size": 32}, "within chunks of the text"),
        (
            "longcat_flash",
            EXPERTS | LATENT | {"num_key_value_heads": 8},
            r"\(multi-head latent attention, MLA\) in a way of",
        ),
        ("deepseek_v4", {"index_topk": 16}, "what an indexer of its own chooses"),
        ("llama", {"is_causal": False}, "attends to later tokens too"),  # listed classes, which are not tried otherwise
        ("gemma3_text", {"use_bidirectional_attention": True}, "attends to later tokens too"),
        ("laguna", EXPERTS | uneven, r"in several ways \(4/2 heads of 16, 8/2 heads of 16\)"),
        ("phimoe", EXPERTS | {"rope_parameters": rope}, "PhimoeForCausalLM rotates a token by the length"),
    )
    for kind, changes, why in cases:
        with pytest.raises(UnsupportedError, match=why):
            layer_specs(fresh(kind, **changes))

    class LlamaForCausalLM(transformers.LlamaForCausalLM):  # by the same name
        pass

    model, ids = LlamaForCausalLM(tiny("llama").config).eval(), prompt(30)
    with attached(model, Full()) as kv:
        engine = Engine(kv)
        assert "LlamaForCausalLM, which is not from transformers" in str(engine.plain_reason)
        tokens = engine.generate(ids, max_new_tokens=4).tokens[0]
    assert tokens == model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)[0, 30:].tolist()


Saved = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saved:
    """A folder with an unlisted model in the hub's layout; results of comparisons go to a cache of this test."""
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_check, "_known", {})

    def save(kind: str, **changes: Any) -> Path:
        return Path(saved_in(model_of(kind, vocab_size=259, **changes), tmp_path / kind).name)

    return save


def test_a_method_that_must_know_more_is_refused_before_full_runs(saved: Saved, tmp_path: Path) -> None:
    settings, presets = Settings(results=Results(root=str(tmp_path / "runs"))), {"method": "my_streaming"}
    with pytest.raises(ValueError, match="method=my_streaming must know how the model rotates keys"):
        evaluate(Streaming(), niah(), HuggingFace(str(saved("nanochat"))), settings, presets=presets)
    assert not (tmp_path / "runs").exists()


def test_it_is_compared_with_generate_once_and_the_result_is_shown(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HuggingFace(str(saved("glm4_moe")))
    info = source.describe()
    assert (info.architecture, info.served.num_kv_heads, info.head_dim) == ("Glm4MoeForCausalLM", 2, 16)
    assert (info.inner_size, info.chosen_experts) == (48, 2)
    assert info.num_parameters == sum(weight.numel() for weight in source.load("fp32", "cpu").model.parameters())
    compare, compared = model_check._compared, list[str]()
    monkeypatch.setattr(model_check, "_compared", lambda *asked: (compared.append(asked[2]), compare(*asked))[1])

    def run(root: str, **changes: Any) -> Any:
        monkeypatch.setattr(model_check, "_known", {})  # as in another process
        settings = Settings(results=Results(root=str(tmp_path / root)), baseline="off", warmup=0, **changes)
        return evaluate(PQCache(), niah(), source, settings)

    first = run("one")
    assert first.info["model_check"]["tokens"] > 380
    assert first.info["model_check"]["difference"] < 1e-4
    assert first.info["own_forward"] is not None
    (table,) = comparisons([first])
    assert any("checked against generate on" in line for line in conditions(table))
    assert run("two").info["model_check"] == first.info["model_check"]
    assert compared == ["fp32"]
    run("three", dtype="bf16")
    assert compared == ["fp32", "bf16", model_check.COPY]


@pytest.mark.parametrize(("dtype", "factor"), [("fp32", 1.1), ("bf16", 1.02)])
def test_a_model_that_the_engine_computes_otherwise_is_refused(
    dtype: str, factor: float, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rounding in the model's own dtype is larger than the error."""
    from transformers.models.granite import modeling_granite as granite

    folder, forward = saved("granite"), granite.GraniteAttention.forward

    def own(module: Any, hidden_states: torch.Tensor, *args: Any, **more: Any) -> Any:
        """Attention that does something else when it runs through an interface that it does not know."""
        out, weights = forward(module, hidden_states, *args, **more)
        return out * (factor if module.config._attn_implementation == NAME else 1.0), weights

    monkeypatch.setattr(granite.GraniteAttention, "forward", own)
    for _ in range(2):  # what was refused is compared again, because the engine may have been repaired
        with pytest.raises(ModelError, match=r"GraniteForCausalLM\) is not computed here .* differ by 0\.\d+ of their"):
            evaluate(Full(), niah(), HuggingFace(str(folder)), dtype=dtype, results=Results(root=str(folder / "runs")))


BY_CONFIG = {  # the last are of texts and images, by their text part
    "gemma2": r"caps its attention logits \(attn_logit_softcapping=50",
    "llama4_text": r"within chunks of the text \(attention_chunk_size=8192",
    "mllama": r"cannot be built from its config \(Unrecognized configuration class",
    "t5": "T5ForConditionalGeneration, an encoder-decoder",
    "bert": "BertForMaskedLM .* continues no text",
    "mamba": "linear attention or a state space",
    "zamba2": "not built of decoder layers",
    "gpt2": "not built of decoder layers",
    "opt": "learned positions or ALiBi",
    "internvl": "whose text part is Qwen2ForCausalLM: it is not read out of this whole",
    "llava": "whose text part is LlamaForCausalLM: it is not read out of this whole",
    "llama4": r"within chunks of the text \(attention_chunk_size=8192",
    "kimi_k25": "whose text part is DeepseekV3ForCausalLM: it is not read out of this whole",
    "minimax_m3_vl": "an indexer of its own chooses",
    "gemma3n": "whose text part is Gemma3nForCausalLM: it is not read out of this whole",
    "glm4v": "Glm4vForConditionalGeneration .* continues no text",
}


@pytest.mark.parametrize("kind", BY_CONFIG)
def test_a_checkpoint_is_refused_by_what_it_does(kind: str, tmp_path: Path) -> None:
    others = {"t5": "T5ForConditionalGeneration", "bert": "BertForMaskedLM", "mllama": "MllamaForCausalLM"}
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | WHOLES | others
    if kind not in names:
        pytest.skip("needs a newer transformers")
    config = AutoConfig.for_model(kind).to_dict() | {"architectures": [names[kind]]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=BY_CONFIG[kind]):
        HuggingFace(str(tmp_path), window=100).describe()


@pytest.mark.tokens
@pytest.mark.parametrize("kind", LENT)
def test_a_family_for_which_transformers_takes_the_class_of_another_runs(kind: str, saved: Saved) -> None:
    """Its config.json names a class that transformers has not; a class by that of Llama's own name is refused."""
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip("needs a newer transformers")
    folder, ids = saved(kind, eos_token_id=None), prompt(40)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]

    def named(architecture: str, **changes: Any) -> HuggingFace:
        (folder / "config.json").write_text(json.dumps(config | changes | {"architectures": [architecture]}))
        return HuggingFace(str(folder))

    source = named("Own3ForCausalLM")
    model = source.load("fp32", "cpu").model
    assert source.describe().architecture == "LlamaForCausalLM"
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, 40:].tolist()
    assert answered(model, ids, Full()) == answered(model, ids, SnapKV(), 17) == expected
    for other in ("Own3ForSequenceClassification", "Own3Model"):
        with pytest.raises(ModelError, match=f"is {other}"):
            named(other).describe()
    with pytest.raises(ModelError, match="is Own3ForCausalLM"):
        named("Own3ForCausalLM", model_type="llama").describe()


BY_PROBE: dict[str, str] = {
    "vaultgemma": "caps its attention logits",
    "diffllama": "32 calls from 16 layers",
    "doge": "mask functions",
}


@pytest.mark.parametrize("kind", BY_PROBE)
def test_the_probe_sees_what_attention_does(kind: str) -> None:
    model = on_meta(AutoConfig.for_model(kind), AutoModelForCausalLM.from_config)
    with pytest.raises(ProbeError, match=BY_PROBE[kind]):
        probe(model, layer_kinds(model.config).windows)


def test_the_probe_runs_where_kvpress_has_wrapped_what_an_earlier_one_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, PROBE, lambda *_, **__: pytest.fail("an earlier probe is asked"))
    model = on_meta(AutoConfig.for_model("starcoder2", **SHAPE), AutoModelForCausalLM.from_config)
    assert len(probe(model, layer_kinds(model.config).windows)) == SHAPE["num_hidden_layers"]


def test_the_probe_sees_masks_that_are_not_those_of_the_config() -> None:
    config = AutoConfig.for_model("starcoder2", **SHAPE | {"sliding_window": 24})
    model = on_meta(config, AutoModelForCausalLM.from_config)
    assert [call.heads for call in probe(model, (24,) * 3)] == [(8, 2, 16, 16, False, None)] * 3
    for windows in ((None,) * 3, (25,) * 3, (24, 23, 24)):
        with pytest.raises(ProbeError, match=r"see others than .* that its config names|all tokens up to its own"):
            probe(model, windows)
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ProbeError, match=r"later tokens too \(layer 1"):
        probe(model, (24,) * 3)
