"""Text parts of models of texts and images give the tokens of the whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from harness import Engine, attached
from harness.engine.hf import layer_specs
from harness.models.hub import HuggingFace
from harness.models.layer_kinds import layer_kinds
from methods.full import Full
from methods.snapkv import SnapKV
from tests.tiny import WHOLE, prompt, saved, whole


def made(name: str, folder: Path, *, tied: bool = False) -> PreTrainedModel:
    """A whole with random weights that is saved in a folder, in the hub's layout."""
    model = whole(name, tied=tied)
    saved(model, folder)
    return model


def answered(folder: Path, ids: torch.Tensor, method: Any, chunk: int | None) -> list[int]:
    model = HuggingFace(str(folder)).load("fp32", "cpu").model
    with attached(model, method, budget=1.0) as kv:
        return Engine(kv, prefill_chunk=chunk).generate(ids, max_new_tokens=8).tokens[0]


def of_whole(model: PreTrainedModel, ids: torch.Tensor) -> list[int]:
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.tokens
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_a_text_part_gives_the_tokens_of_the_whole(name: str, tied: bool, tmp_path: Path) -> None:
    both, ids = made(name, tmp_path, tied=tied), prompt(60)
    expected = of_whole(both, ids)
    assert answered(tmp_path, ids, Full(), 17) == answered(tmp_path, ids, SnapKV(), None) == expected
    info = HuggingFace(str(tmp_path)).describe()
    loaded = HuggingFace(str(tmp_path)).load("fp32", "cpu").model
    assert (info.window, info.layer_windows) == (4096, layer_kinds(loaded.config).windows)
    assert info.head_dim == layer_specs(loaded)[-1].head_dim
    assert info.architecture == type(loaded).__name__
    assert info.num_parameters == loaded.num_parameters()


FIRST = {  # of the first releases
    "mistral3": {r"^model\.(language_model\.)": r"\1model.", r"^lm_head": "language_model.lm_head"},
    "qwen2_5_vl": {r"^model\.language_model\.": "model.", r"^model\.visual\.": "visual."},
}
FIRST["mistral3"] |= {r"^model\.(vision_tower|multi_modal)": r"\1"}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_releases_layout_gives_the_same(name: str, tmp_path: Path) -> None:
    """Also Qwen2.5-VL's config, which has no part about texts, and an older name of its rotation."""
    both, ids = made(name, tmp_path), prompt(60)
    tensors = load_file(tmp_path / "model.safetensors")
    for ours, theirs in FIRST[name].items():
        tensors = {re.sub(ours, theirs, key): tensor for key, tensor in tensors.items()}
    assert not any(key.startswith(("model.language", "model.visual", "model.vision")) for key in tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    if name == "qwen2_5_vl":
        text = config.pop("text_config")
        kept = {key: value for key, value in text.items() if key not in ("model_type", "rope_parameters")}
        rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
        config = kept | config | rope
    else:  # the first config does not say whether embeddings are tied
        del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert answered(tmp_path, ids, Full(), None) == of_whole(both, ids)
