"""The families of models that run here, each as a small random model, and what every method must give on it.

`make families` runs every method on every family, and writes what it sees for the table in docs/comparison.md."""

from __future__ import annotations

import csv
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
from transformers import PreTrainedModel

from harness import Engine, RunningBatch, attached
from harness.engine.cache import UnsupportedError
from harness.models.base import ModelError
from harness.models.hub import HuggingFace
from methods.base import BudgetError, Method
from methods.full import Full
from methods.kivi import Kivi
from tests.methods.test_contract import NAMES, small
from tests.tiny import prompt, saved, tiny

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
    "Qwen3.5": "qwen3_5_text",
    "Qwen3-Next": "qwen3_next",
    "Nemotron-H": "nemotron_h",
    "Falcon-H1": "falcon_h1",
    "LFM2": "lfm2",
    "Granite 4 H": "granitemoehybrid",
    "Jamba": "jamba",
    "Bamba": "bamba",
    "OLMo-Hybrid": "olmo_hybrid",
}
METHODS = list({type(small(name)): name for name in reversed(NAMES) if name != "kvpress"}.values())[::-1]
LENGTHS, CHUNK, SHARE, NEW = (61, 47, 80), 19, 0.4, 8
TABLE = Path(__file__).parents[1] / "results" / "published" / "families.csv"
REFUSALS = (BudgetError, ModelError, UnsupportedError)
RUNS = "runs"
_folders = TemporaryDirectory(prefix="families-")


@cache
def made(architecture: str) -> PreTrainedModel:
    """The family's model. gpt-oss gets sinks that take much of the weight, other than those of a random start."""
    plain = deepcopy(tiny(architecture))
    if architecture == "gpt_oss":
        for index, layer in enumerate(plain.model.layers):
            layer.self_attn.sinks.data = torch.linspace(1, 5, 8).roll(index)
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
    batch = RunningBatch(engine)
    running = [engine.join(batch, text, max_new_tokens=NEW) for text in ids]
    while batch.sequences:
        batch.step()
    return [one.out.tokens[0] for one in running]


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
    assert not found, "\n".join(found)
    return RUNS


def main() -> None:
    rows = []
    for title, architecture in FAMILIES.items():
        rows.append([title, *(outcome(architecture, name) for name in METHODS)])
        sys.stdout.write(f"{title}: {sum(cell == RUNS for cell in rows[-1])} of {len(METHODS)} methods run\n")
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([["family", *METHODS], *rows])


if __name__ == "__main__":
    main()
