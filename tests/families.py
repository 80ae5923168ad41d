"""The families of models that run here, each as a small random model, and what every method must give on it.

`make families` runs every method on every family, and writes what it sees for the table in docs/comparison.md."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from harness import Engine, attached
from harness.engine.cache import UnsupportedError
from harness.models.base import ModelError
from harness.models.hub import HuggingFace
from methods.base import BudgetError, Method
from methods.full import Full
from methods.kivi import Kivi
from tests.batches import together
from tests.methods.test_contract import NAMES, small
from tests.tiny import WHOLE, prompt, saved, tiny, whole

FAMILIES = {  # as the table calls them -> the model of tests/tiny.py
    "Llama": "llama",
    "Mistral": "mistral",
    "Mixtral": "mixtral",
    "Qwen2": "qwen2",
    "Qwen2.5 14B, 32B": "qwen2.5-14b",
    "Qwen3": "qwen3",
    "Qwen3-MoE": "qwen3_moe",
    "Phi-3": "phi3",
    "Phi-4-mini": "phi4",
    "Gemma 3 1B": "gemma3_text",
    "Gemma 3 4B and larger": "gemma3",
    "GLM-4": "glm",
    "GLM-4-0414": "glm4",
    "SmolLM3": "smollm3",
    "gpt-oss": "gpt_oss",
}
MORE = {  # that the suite takes with fewer methods, or by tests of their own
    "Mistral Small 3, Magistral": "mistral3",
    "Ministral 3": "ministral3",
    "Qwen2.5-VL": "qwen2_5_vl",
    "Qwen3-VL": "qwen3_vl",
    "Qwen3-VL-MoE": "qwen3_vl_moe",
    "GLM-4.5": "glm4_moe",
    "MiniMax-M2": "minimax_m2",
    "OLMo 3": "olmo3",
    "Hunyuan": "hunyuan_v1_dense",
    "Gemma 3n": "gemma3n_text",
    "Gemma 4 31B": "gemma4_text",
    "Gemma 4 26B-A4B": "gemma4_moe",
    "Gemma 4 E2B and E4B": "gemma4",
    "MiMo-V2-Flash": "mimo_v2_flash",
    "Granite 4.0 dense": "granite4",
    "Granite 4.0 H": "granitemoehybrid",
    "Qwen3.5": "qwen3_5_text",
    "Qwen3-Next": "qwen3_next",
    "Nemotron-H, Nemotron 3": "nemotron_h",
    "Falcon-H1": "falcon_h1",
    "LFM2": "lfm2",
    "Jamba": "jamba",
    "Bamba": "bamba",
    "OLMo Hybrid": "olmo_hybrid",
    "DeepSeek V2": "deepseek_v2",
    "DeepSeek V3, R1; Kimi K2": "deepseek_v3",
    "DeepSeek V3.2": "deepseek_v32",
    "GLM-5": "glm_moe_dsa",
    "GLM-4.7-Flash": "glm4_moe_lite",
    "Mistral 4": "mistral4",
    "MiniCPM3": "minicpm3",
    "Kimi Linear": "kimi_linear",
}
NONE_RUNS = {  # families that every method is refused on -> a kind that transformers builds of its own numbers
    "MiniMax-M3": "minimax_m3_vl_text",
    "Gemma 2": "gemma2",
    "Llama 4": "llama4_text",
    "Mamba, Mamba 2": "mamba2",
    "BLOOM, MPT": "bloom",
    "OPT": "opt",
}
OWN = {type(small(name)): name for name in reversed(NAMES) if name != "kvpress"}
METHODS = [*reversed(OWN.values()), "dsa"]
LENGTHS, CHUNK, SHARE, NEW = (61, 47, 80), 19, 0.4, 8
TABLE = Path(__file__).parents[1] / "results" / "published" / "families.csv"
REFUSALS = (BudgetError, ModelError, UnsupportedError)
RUNS = "runs"
_folders = TemporaryDirectory(prefix="families-")


@cache
def made(architecture: str) -> PreTrainedModel:
    """The family's model. Layers with sinks get some that take much of the weight, and Hunyuan gets norms behind the
    rotation that change it, other than those of a random start."""
    if architecture in WHOLE:
        return whole(architecture)
    plain = deepcopy(tiny(architecture))
    if architecture in ("gpt_oss", "mimo_v2_flash"):
        for index, layer in enumerate(plain.model.layers):
            if layer.self_attn.sinks is not None:
                layer.self_attn.sinks.data = torch.linspace(1, 5, 8).roll(index)
    if architecture == "hunyuan_v1_dense":
        for layer in plain.model.layers:
            for norm in (layer.self_attn.query_layernorm, layer.self_attn.key_layernorm):
                norm.weight.data = torch.linspace(0.5, 2, 16)
    return plain


def source(architecture: str) -> HuggingFace:
    """A source of the family's model, which is saved in the hub's layout."""
    folder = Path(_folders.name) / architecture
    return HuggingFace(str(folder)) if folder.exists() else saved(made(architecture), folder)


@cache
@torch.inference_mode(mode=False)
def model(architecture: str) -> PreTrainedModel:
    loaded = source(architecture).load("fp32", "cpu").model
    loaded.generation_config.eos_token_id = None  # no answer ends early
    return loaded


def prompts() -> list[Tensor]:
    return [prompt(length, seed=length) for length in LENGTHS]


def method_of(name: str) -> Method:
    """A method whose windows are small, and that does to these short prompts what it does to long ones."""
    method = small(name)
    return replace(method, group=16, residual=16) if isinstance(method, Kivi) else method


def answers(kv: Any, ids: Sequence[Tensor], chunk: int | None = None) -> list[list[int]]:
    """The tokens of prompts that run as one batch."""
    return batch_of(Engine(kv, prefill_chunk=chunk), ids)


def batch_of(engine: Engine, ids: Sequence[Tensor]) -> list[list[int]]:
    return [answer.tokens[0] for answer in together(engine, ids, NEW)]


def attach(architecture: str, method: Method, budget: float, placement: str = "device") -> Any:
    calibration = prompt(64, seed=9)
    return attached(model(architecture), method, budget=budget, placement=placement, calibration=calibration)  # type: ignore[arg-type]


@cache
def generated(architecture: str) -> list[list[int]]:
    """What `model.generate` answers to each prompt alone."""
    return [by_loop(model(architecture), ids) for ids in prompts()]


def by_loop(loaded: PreTrainedModel, ids: Tensor) -> list[int]:
    """The tokens of transformers' own loop."""
    out = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


def faults(architecture: str, name: str) -> list[str]:
    """Run a method on a family. -> what it does otherwise than it should, nothing if all is right"""
    method, wanted, found = method_of(name), generated(architecture), []
    ways = [("device", None), ("device", CHUNK), *([("host", None)] if method.offloads else [])]
    for place, chunk in () if isinstance(method, Kivi) else ways:
        with attach(architecture, method, 1.0, place) as kv:
            if (whole := answers(kv, prompts(), chunk)) != wanted:
                found.append(f"{name} of a budget that covers all, {place}, chunk={chunk}: {whole} for {wanted}")
    if isinstance(method, Kivi):
        found += _unlike(architecture, replace(method, bits=8))
    with attach(architecture, method, SHARE) as kv:
        out = Engine(kv).generate(prompts()[0], max_new_tokens=NEW)
        here = answers(kv, prompts())
    if out.tokens[0] != here[0]:
        found.append(f"{name} in a batch: {here[0]} for {out.tokens[0]} alone")
    if method.uses_budget and not 1 <= out.measured["attended_prompt"] < LENGTHS[0]:
        found.append(f"{name} read {out.measured['attended_prompt']} of {LENGTHS[0]} tokens")
    if method.offloads:
        with attach(architecture, method, SHARE, "host") as kv:
            if (there := answers(kv, prompts())) != here:
                found.append(f"{name} of placement=host: {there} for {here}")
    return found


@torch.inference_mode()
def _unlike(architecture: str, method: Method) -> list[str]:
    """Whether the logits behind a prompt differ from Full's by more than a few percent of what sets tokens apart."""
    logits = []
    for each in (Full(), method):
        with attach(architecture, each, 1.0) as kv:
            cache = kv.cache(capacity=90)
            kv.model(prompts()[2], past_key_values=cache, use_cache=True)
            cache.seal()
            steps = [kv.model(ids, past_key_values=cache, use_cache=True).logits for ids in prompt(8).split(1, 1)]
        logits.append(torch.cat(steps, 1))
    exact, coded = logits
    distance = float((coded - exact).norm() / (exact - exact.mean(-1, keepdim=True)).norm())
    return [] if 0 < distance < 0.05 else [f"{method} is {distance:.3f} from Full"]


def outcome(architecture: str, name: str) -> str:
    """RUNS, or the sentence with which the method or the model is refused. Wrong results are an `AssertionError`."""
    try:
        found = faults(architecture, name)
    except REFUSALS as refusal:
        return str(refusal)
    except ValueError as refusal:
        why = str(refusal).partition(" ")[2].partition(": choose ")
        if not why[1]:
            raise
        return why[0].partition(", which could not")[0]
    assert not found, "\n".join(found)
    return RUNS


def refusal(kind: str) -> str:
    """Why no method runs on a kind of model, by its config."""
    config = AutoConfig.for_model(kind).to_dict() | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]}
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            HuggingFace(folder, window=100).describe()
        except ModelError as error:
            reason = str(error).removeprefix(folder).partition(", which is not supported")[0].strip()
            return re.sub(r" \(\w+=\S+\)$", "", reason)
    raise AssertionError(f"{kind} runs")


def main() -> None:
    rows = []
    for title, architecture in (FAMILIES | MORE).items():
        rows.append([title, *(outcome(architecture, name) for name in METHODS)])
        sys.stdout.write(f"{title}: {sum(cell == RUNS for cell in rows[-1])} of {len(METHODS)} methods run\n")
    rows += [[title, *[refusal(kind)] * len(METHODS)] for title, kind in NONE_RUNS.items()]
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([["family", *METHODS], *rows])


if __name__ == "__main__":
    main()
