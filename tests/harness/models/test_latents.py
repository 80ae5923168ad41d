"""Models of latent attention (MLA): a token is one row of rotated channels and a latent, shared by all query heads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import max_pool1d
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from harness import Engine, attached
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.engine.footprint import footprint
from harness.jobs import model_check
from harness.models.layer_kinds import layer_kinds
from harness.models.probe import on_meta, probe
from harness.models.text_part import make_known
from methods.full import Full
from methods.quest import Quest, page_bounds
from methods.snapkv import SnapKV
from methods.tiers.codec import LatentCodec
from methods.tiers.codecs import codec_of
from tests.families import source
from tests.fast import MODEL, niah, run
from tests.methods.test_contract import small
from tests.quick import every
from tests.tiny import LATENT, MLA, fresh, prompt, saved, tiny

FAMILY, LENGTH = "deepseek_v3", 70
ROW = MLA["qk_rope_head_dim"] + MLA["kv_lora_rank"]  # numbers of a token in a layer
KINDS = [*LATENT, "mistral4"]  # the last is the text part of a model of images


@torch.inference_mode()
def filled(kv: Attachment, ids: Tensor, steps: int = 1) -> KVCache:
    """A sealed cache that holds ids, and took some steps."""
    held = kv.start(KVCache, capacity=ids.shape[1] + max(steps, 1))
    Engine(kv).prefill(held, ids, whole=True)
    held.seal()
    for step in range(steps):
        Engine(kv).run(prompt(1, seed=step), held)
    return held


@pytest.mark.parametrize("family", every(2, LATENT))
@torch.inference_mode()
def test_absorbed_attention_is_expanded_attention_but_for_rounding(family: str) -> None:
    """Of a prompt, and of each step after it; the modules are as they were afterwards."""
    model, ids = tiny(family), prompt(LENGTH, batch=2)
    wanted = model(ids).logits
    with attached(model, Full()) as kv:
        assert {spec.unknown for spec in kv.specs} == {()}
        held = kv.cache(capacity=LENGTH, batch=2)
        given = [kv.model(part, past_key_values=held, use_cache=True).logits for part in ids.split(64, 1)[:1]]
        held.seal()
        given += [kv.model(token, past_key_values=held, use_cache=True).logits for token in ids[:, 64:].split(1, 1)]
    assert_close(torch.cat(given, 1), wanted, rtol=1e-3, atol=1e-4)
    assert torch.equal(model(ids).logits, wanted)


def weights(layer: int, ids: Tensor) -> Tensor:
    """The attention weights of one layer of the model itself, with keys that are expanded, [H T S]."""
    model = fresh(FAMILY)
    model.set_attn_implementation("eager")
    return model(ids, output_attentions=True).attentions[layer][0]


@torch.inference_mode()
def test_a_vote_is_the_mean_over_all_query_heads() -> None:
    """SnapKV's, and that of pages, by loops over heads with keys of their own."""
    ids, method = prompt(LENGTH), SnapKV(window=4, kernel=3)
    with attached(tiny(FAMILY), method, budget=0.4) as kv:
        layers: list[Any] = filled(kv, ids).method_layers
        kept = [layer.positions[0, 0].tolist() for layer in layers]
    for index, rows in enumerate(kept):
        votes = torch.zeros(LENGTH - 4)
        for head in weights(index, ids):
            votes += head[-4:, :-4].sum(0) / 8
        best = max_pool1d(votes[None], 3, stride=1, padding=1)[0].topk(28 - 4).indices.sort().values
        assert rows == [*best.tolist(), *range(LENGTH - 4, LENGTH)]
    quest = Quest(page_size=4, dense_layers=(), min_pages=2)
    with attached(tiny(FAMILY), quest, budget=0.4) as kv:
        held = filled(kv, ids, 0)
        (layer, *_), queries = held.method_layers, []
        read = layer.reads.read  # type: ignore[attr-defined]
        layer.reads.read = lambda x, plan: (queries.append(x.q), read(x, plan))[1]  # type: ignore[attr-defined]
        Engine(kv).run(prompt(1), held)
        assert layer.selected_positions().shape[:2] == (1, 1)  # one choice for all query heads
        bounds = page_bounds(layer.store.k[:, :, :LENGTH], 4)[0, 0]  # type: ignore[attr-defined]
        most, least = bounds[:-1].chunk(2, -1)
        scores = torch.zeros(len(most))
        for head in queries[0][0, :, 0]:
            scores += torch.maximum(head * most, head * least).sum(-1) / 8
        pages = {*(scores.topk(28 // 4 - 1).indices.tolist()), len(most)}
        assert {place // 4 for place in layer.selected_positions()[0, 0].tolist()} == pages


REFUSED = {
    "adakv": "shares a budget",
    "shadowkv": "low-rank key already",
    "infinigen": "skews the keys",
    "kivi": "is both",
}


def test_what_means_nothing_on_latents_is_refused_by_name() -> None:
    for name, why in REFUSED.items():
        with pytest.raises(ValueError, match=rf"does not run on latent attention \(MLA\), for .*{why}"):
            attached(tiny(FAMILY), small(name), budget=0.4).__enter__()
    with pytest.raises(ValueError, match="8 copies of each latent"):
        attached(tiny(FAMILY), SnapKV(select_per="query_head"), budget=0.4).__enter__()
    for codec, family, why in (
        ("int4", FAMILY, "choose fp8_ds_mla"),
        ("fp8_ds_mla", "llama", "which this model does not have"),
        ("fp8_ds_mla", FAMILY, "this model's latents have 32"),
    ):
        with pytest.raises(ValueError, match=why):
            attached(tiny(family), small("coded"), codec=codec_of(codec)).__enter__()


@pytest.mark.parametrize("name", ["coded", "snapkv", "quest"])
@torch.inference_mode()
def test_latents_in_8_bits_take_656_bytes(name: str) -> None:
    """On the device, and in the bytes that a step reads, of DeepSeek-V3's widths; answers are near the plain ones'."""
    model = fresh(FAMILY, kv_lora_rank=512, qk_rope_head_dim=64, num_hidden_layers=2)
    logits = []
    for codec in (None, codec_of("fp8_ds_mla")):
        with attached(model, replace(small(name)), budget=0.4, codec=codec) as kv:
            held = filled(kv, prompt(LENGTH), 0)
            logits.append(Engine(kv).run(prompt(1), held))
    layer: Any = held.method_layers[-1]
    assert sum(x.nbytes for x in layer.far.held().values()) == layer.far.length * 656
    plain = layer.bytes_read - (layer.attended.prompt if name == "quest" else layer.far.length) * 656
    assert plain == 576 * 4  # the new token
    assert 0 < (logits[0] - logits[1]).norm() < 0.1 * logits[0].norm()
    codec = LatentCodec()
    assert codec.layout(576, torch.bfloat16).token_bytes == 656
    rows = torch.randn(1, 1, 9, 576, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 576)
    k, v = codec.decode(codec.encode(rows, rows[..., 64:]), torch.float32)
    assert_close(k, rows, rtol=1 / 16, atol=1e-2)
    assert v.data_ptr() == k[..., 64:].data_ptr()


@pytest.mark.parametrize("family", every(3, KINDS))
def test_a_row_a_forecast_and_memory_name_the_same_bytes(
    family: str, cli: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder in the hub's layout, by the command."""
    monkeypatch.setattr(model_check, "cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr(model_check, "_known", {})
    model = source(family) if family == "mistral4" else saved(fresh(family, vocab_size=264), tmp_path / family)
    info = model.describe()
    assert (info.served.num_kv_heads, info.served.values_in_keys) == (1, True)
    words = ["model=hf", f"model.name={model.name}", "chat=none", "task.depths=1", "task.lengths=[300]"]
    code, said, err = cli(*words, "method=full", "baseline=off", "dry_run=true")
    assert code == 0, err
    row = run(tmp_path / "runs", Full(), niah(lengths=[300], depths=1), model)
    held = row.summary["memory"]["kv_device_bytes"]
    tokens = row.records[0].prompt_tokens + 6
    assert held == info.kv_bytes("fp32", tokens) == tokens * info.num_layers * info.head_dim * 4
    assert re.search(r"KV cache +\S+ \S+ for Full at its longest", said)
    code, _, err = cli(*words, "method=snapkv", "budget=0.3", "task.max_new_tokens=4")
    assert code == 0, err


def test_a_cache_holds_each_latent_once() -> None:
    with attached(tiny(FAMILY), Full()) as kv:
        held = filled(kv, prompt(LENGTH))
        assert footprint(held.layers)["device"] == 3 * (LENGTH + 1) * ROW * 4
        assert [set(contents) for contents in held.contents()] == 3 * [{"k0", "seen"}]


QWEN = {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128}
FULL_OF_KIMI = ["full_attention" if i % 4 == 3 or i == 26 else "linear_attention" for i in range(27)]
V2 = {"num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": None} | {
    "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
}  # fmt: skip
REAL: dict[str, tuple[str, dict[str, Any]]] = {  # as docs/comparison.md says -> what is not transformers' default
    "DeepSeek V3, R1": ("deepseek_v3", {}),
    "DeepSeek V3.2": ("deepseek_v32", {}),
    "GLM-5": ("glm_moe_dsa", {}),
    "Kimi K2": ("deepseek_v3", {"num_attention_heads": 64, "num_key_value_heads": 64}),
    "DeepSeek V2-Lite": ("deepseek_v2", V2),
    "GLM-4.7-Flash": ("glm4_moe_lite", {}),
    "MiniCPM3 4B": ("minicpm3", {}),
    "Kimi Linear 48B": ("kimi_linear", {"layer_types": FULL_OF_KIMI}),
    "Qwen3 8B": ("qwen3", QWEN | {"num_hidden_layers": 36, "num_key_value_heads": 8}),
    "Qwen3 30B-A3B": ("qwen3_moe", QWEN | {"num_hidden_layers": 48, "num_key_value_heads": 4, "hidden_size": 2048}),
    "Llama 3.1 8B": ("llama", QWEN | {"num_hidden_layers": 32, "num_key_value_heads": 8}),
    "Mistral Small 4": ("mistral4", {}),
}


def bytes_of(kind: str, own: dict[str, Any]) -> tuple[float, float | None]:
    """KV bytes of a token in 16 bits, by a published config; and if keys and values were expanded."""
    config = AutoConfig.for_model(kind, **own)
    make_known(config)
    layers = len(layer_kinds(config).attending)
    few = {"num_hidden_layers": 2, "n_routed_experts": 16, "num_experts": 16, "num_local_experts": 16}
    few |= {"mlp_layer_types": ["dense", "sparse"], "layer_types": (getattr(config, "layer_types", None) or [])[-2:]}
    short = AutoConfig.for_model(kind, **own | {name: few[name] for name in few if hasattr(config, name)})
    windows = layer_kinds(short).windows
    heads = probe(on_meta(short, AutoModelForCausalLM.from_config), windows)[0].heads
    info = replace(MODEL.describe(), layer_windows=(None,) * layers, layer_heads=(heads,) * layers)
    expanded = 2 * layers * heads.num_heads * (config.qk_head_dim + config.v_head_dim) if heads.values_in_keys else None
    return info.kv_bytes("bf16", 1), expanded


def test_the_bytes_of_real_models_are_those_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "comparison.md").read_text(encoding="utf-8")
    table = page[page.index("| KB per token in 16 bits |") :].splitlines()[:4]
    names, _, stored, expanded = ([cell.strip() for cell in line.split("|")[2:-1]] for line in table)
    assert names == [*REAL]
    found = [bytes_of(*how) for how in REAL.values()]
    assert stored == [f"{kept / 1000:.1f}" for kept, _ in found]
    assert expanded == ["" if wide is None else f"{wide / 1000:,.0f}" for _, wide in found]
