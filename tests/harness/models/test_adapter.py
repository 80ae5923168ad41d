"""LoRA adapters: merged into plain modules, with peft's own logits, and refused where they do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from evals.niah import Niah
from harness.commands import report
from harness.config.settings import Results, Settings
from harness.jobs.evaluate import evaluate
from harness.models import adapter as adapters
from harness.models import embedded
from harness.models.base import ModelError
from harness.models.embedded import SmolLM2
from harness.models.hub import HuggingFace
from harness.models.random import byte_tokenizer
from methods.full import Full
from tests.fast import MODEL
from tests.tiny import prompt, saved, tiny

peft = pytest.importorskip("peft", reason="needs peft: pip install 'kv-harness[adapters]'")
Lora = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(saved(tiny("llama"), tmp_path / "model").name)


@pytest.fixture
def lora(tmp_path: Path) -> Lora:
    """Saves an adapter of peft for a tiny model, with weights that are not zero."""

    def save(base: PreTrainedModel | None = None, **changes: Any) -> Path:
        torch.manual_seed(3)
        config = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
        adapted = peft.get_peft_model(deepcopy(base or tiny("llama")), peft.LoraConfig(**config | changes))
        adapted.save_pretrained(tmp_path / "lora")
        return tmp_path / "lora"

    return save


def merged(folder: Path) -> PreTrainedModel:
    plain: PreTrainedModel = peft.PeftModel.from_pretrained(deepcopy(tiny("llama")), str(folder)).merge_and_unload()
    return plain


def same(ours: PreTrainedModel, theirs: PreTrainedModel) -> bool:
    return torch.equal(ours(prompt(30)).logits, theirs(prompt(30)).logits)


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True, "use_dora": True, "bias": "lora_only"}])
def test_the_model_is_the_one_that_peft_merges(model: Path, lora: Lora, changes: dict[str, Any]) -> None:
    folder = lora(**changes)
    source = HuggingFace(str(model), adapter=str(folder))
    loaded = source.load("fp32", "cpu")
    assert same(loaded.model, merged(folder))
    assert not same(loaded.model, tiny("llama"))
    assert list(map(type, loaded.model.modules())) == list(map(type, tiny("llama").modules()))
    base = HuggingFace(str(model)).identity()
    assert loaded.revision.startswith(f"{base.revision}+adapter-sha256:")
    (folder / "adapter_config.json").write_text((folder / "adapter_config.json").read_text() + " ")
    assert source.identity().revision != loaded.revision


def test_weights_are_merged_before_they_are_rounded(model: Path, lora: Lora) -> None:
    folder = lora()
    expected = merged(folder).state_dict()
    loaded = HuggingFace(str(model), adapter=str(folder)).load("bf16", "cpu").model
    assert all(torch.equal(x, expected[name].bfloat16()) for name, x in loaded.named_parameters())
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32


def test_the_embedded_model_takes_one_too(model: Path, lora: Lora, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SmolLM2, "folder", lambda self, weights=False: model)
    monkeypatch.setattr(embedded, "find_gguf", lambda: model / "model.safetensors")
    source = SmolLM2(adapter=str(lora()))
    assert same(source.load("fp32", "cpu").model, merged(Path(str(source.adapter))))
    assert "+adapter-sha256:" in source.describe().revision


def test_an_adapter_beside_the_weights_is_merged_as_well(model: Path, lora: Lora) -> None:
    folder = lora()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folder / name, model)
    loaded = HuggingFace(str(model)).load("fp32", "cpu")
    assert same(loaded.model, merged(folder))
    assert "+adapter-sha256:" in loaded.revision
    with pytest.raises(ModelError, match="has an adapter beside its weights"):
        HuggingFace(str(model), adapter=str(folder)).describe()


def test_the_tokenizer_that_an_adapter_was_trained_with_makes_the_prompts(model: Path, lora: Lora) -> None:
    folder, tokenizer = lora(), byte_tokenizer()
    source = HuggingFace(str(model), adapter=str(folder))
    assert source.tokenizer().chat_template == tokenizer.chat_template
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    assert source.tokenizer().chat_template == tokenizer.chat_template


def test_a_report_names_the_adapter(lora: Lora, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, base = tmp_path / "model", MODEL.build(torch.float32, "cpu")
    saved(base, model)
    folder = lora(base)
    task = Niah(lengths=[300], depths=1, max_new_tokens=2)
    settings = Settings(results=Results(str(tmp_path / "runs")), warmup=0)
    for adapter in (None, str(folder)):
        evaluate(Full(), task, HuggingFace(str(model), adapter=adapter), settings)
    assert report.main([str(tmp_path / "runs"), "--details"]) == 0
    text, progress = capsys.readouterr()
    assert "niah full: new" in progress
    assert "niah full with lora: new" in progress
    assert f"niah, {model}, protocol" in text
    assert f"niah, {model} with lora, protocol" in text
    assert text.count("model: a LoRA adapter is merged into its weights (sha256:") == 1


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_cannot_be_merged_is_refused_before_weights_load(
    model: Path, lora: Lora, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(says: str, name: Path = model, adapter: Path | str | None = None) -> None:
        with pytest.raises(ModelError, match=says):
            HuggingFace(str(name), adapter=None if adapter is None else str(adapter)).describe()

    folder = lora()
    refused("lacks adapter_config.json and adapter_model.safetensors", adapter=model)
    refused(f"{folder} is an adapter and holds no model: use model.name=BASE model.adapter={folder}", folder)
    edit(folder / "adapter_config.json", base_model_name_or_path="owner/name")
    refused(f"use model.name=owner/name model.adapter={folder}", folder)
    edit(folder / "adapter_config.json", megatron_config={}, megatron_core="os")
    edit(folder / "adapter_config.json", megatron_config={"a": 1})
    refused("kind of Megatron", adapter=folder)
    edit(folder / "adapter_config.json", megatron_config=None, peft_type="IA3")
    refused("kind IA3", adapter=folder)
    edit(folder / "adapter_config.json", peft_type="LORA")
    edit(model / "config.json", quantization_config={"quant_method": "mxfp4"})
    refused("quantised weights", adapter=folder)
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    refused(r"needs peft: `pip install 'kv-harness\[adapters\]'`", adapter=folder)


@pytest.mark.parametrize(
    ("base", "changes", "says"),
    [
        ("qwen2", {"target_modules": ["q_proj", "v_proj"], "bias": "all"}, "does not fit LlamaForCausalLM"),
        ("phi3", {"target_modules": ["qkv_proj"]}, "does not fit LlamaForCausalLM"),
        ("llama", {"layer_replication": [(0, 2), (0, 3)]}, "weights of its own"),
    ],
)
def test_an_adapter_for_another_model_is_refused(
    model: Path, lora: Lora, base: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        HuggingFace(str(model), adapter=str(lora(tiny(base), **changes))).load("fp32", "cpu")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_embeddings_that_were_trained_apart_from_a_tied_head_are_refused(model: Path, lora: Lora) -> None:
    tied = deepcopy(tiny("llama"))
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    tied.save_pretrained(model)
    folder = lora(tied, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(ModelError, match="tied embeddings"):
        HuggingFace(str(model), adapter=str(folder)).load("fp32", "cpu")
