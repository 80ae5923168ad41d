"""Tokens of every method, stored: what a change of structure must leave as they are.

`python -m tests.stored_tokens` makes stored_tokens.json again; tests/test_stored_tokens.py compares.

Every preset of conf/method runs under both protocols and, where it offloads, in both places, on the plain-torch backend
in fp32; a few further cases take the branches, models and engine settings that these leave out. Nothing depends on the
machine beyond the rounding of fp32: weights and prompts are drawn by number, not by torch's initialisation. A prompt is
taken only where rounding cannot tip it, on any CPU: each token leads by `LEAD` of the logits' spread, and stays the
same under `SHAKES` disturbances of all weights by one part in 10,000. A prompt also has to tell the method from Full,
and not to make it repeat itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from harness import Engine, attached
from harness.config.catalogue import entries, flatten
from harness.config.plugins import build
from harness.config.settings import WITHOUT_EFFECT, recorded_defaults
from harness.results.identity import CORE_VERSION
from kernels.dispatch import use_backend
from methods.base import Method
from methods.full import Full
from tests.own_methods import own_methods
from tests.tiny import ARCHITECTURES, SHAPE

FILE = Path(__file__).with_suffix(".json")
LAYERS, PROMPT, QUESTION, CALIBRATION, NEW, BUDGET = 4, 256, 12, 2048, 12, 0.3
WIDTH = 2.5  # of the weights, over what keeps the variance: attention is far from uniform
LEAD, SHAKES, SHAKE = 0.03, 16, 1e-4


@dataclass(frozen=True, kw_only=True)
class TokenCase:
    """One prompt (or batch) under one method."""

    preset: str
    changes: dict[str, Any] = field(default_factory=dict)  # parameters of the method
    settings: dict[str, int] = field(default_factory=dict)  # batch, prefill_chunk, reuse_steps
    protocol: str = "prompt"
    placement: str = "device"
    architecture: str = "llama"

    @property
    def name(self) -> str:
        more = [f"{key}={value}" for key, value in (self.changes | self.settings).items()]
        return " ".join([self.preset, *more, self.protocol, self.placement, self.architecture])

    @property
    def method(self) -> Method:
        entry = entries("method")[self.preset]
        method: Method = build(entry.values() | self.changes, "method")
        return method


def cases() -> list[TokenCase]:
    presets = [TokenCase(preset=entry.name) for entry in own_methods()]
    places = {one.preset: ["device", "host"] if one.method.offloads else ["device"] for one in presets}
    grid = [
        TokenCase(preset=preset, protocol=protocol, placement=placement)
        for preset in places
        for protocol in ("prompt", "context")
        for placement in places[preset]
    ]
    return [*grid, *further()]


def further() -> Iterator[TokenCase]:
    for architecture in sorted(ARCHITECTURES.keys() - {"llama"}):
        yield TokenCase(preset="full", architecture=architecture)
        yield TokenCase(preset="pqcache", architecture=architecture, placement="host")
    for preset, changes in (
        ("streaming", {"positions": "original"}),
        ("h2o", {"sinks": 4, "compensation": "bytes"}),
        ("snapkv", {"pooling": "avg", "select_per": "query_head"}),
        ("quest", {"select_per": "kv_head"}),
        ("sparq", {"sinks": 4, "mean_value": False, "channel_copy": False}),
        ("infinigen", {"alpha": 1.0, "column_rule": "query", "group_rank": "prob_sum"}),
        ("shadowkv", {"solver": "thin_svd", "hit_cache": False}),
    ):
        yield TokenCase(preset=preset, changes=changes)
    yield TokenCase(preset="pqcache", changes={"cache_tokens": 32, "cache_block": 8}, placement="host")
    settings = {"pqcache": {"reuse_steps": 2}, "snapkv": {"prefill_chunk": 100}, "sparq": {"batch": 2}}
    for preset, changed in settings.items():
        yield TokenCase(preset=preset, settings=changed)


@lru_cache(SHAKES + 1)
def model(architecture: str, shake: int = 0) -> PreTrainedModel:
    """Weights by name and number alone; `shake` > 0: each of them a little larger or smaller."""
    shape = SHAPE | {"hidden_size": 256, "num_hidden_layers": LAYERS} | ARCHITECTURES[architecture]
    if architecture == "gemma3_text":
        shape |= {"num_hidden_layers": 12, "layer_types": None}  # those of the stored tokens
    config = AutoConfig.for_model(architecture, **shape)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight.copy_(_weight(name, weight.shape))
            if shake:
                weight.mul_(1 + SHAKE * _drawn(f"{name}/{shake}", weight.shape))
    return made


def _weight(name: str, shape: torch.Size) -> Tensor:
    if len(shape) > 1:
        return WIDTH * shape[-1] ** -0.5 * _drawn(name, shape)
    return 0.1 * _drawn(name, shape) + (0 if name.endswith("bias") else 1)


def _drawn(name: str, shape: torch.Size) -> Tensor:
    """Uniform in (-1, 1)."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def ids(seed: int | str, length: int = PROMPT) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(3, SHAPE["vocab_size"]) for _ in range(length)]


class Watched:
    """Greedy, and how far each token led the next one, in standard deviations of the logits."""

    def __init__(self) -> None:
        self.leads: list[float] = []

    def pick(self, logits: Tensor) -> Tensor:
        first, second = logits.topk(2).values.unbind(-1)
        self.leads.append(((first - second) / logits.std(-1)).min().item())
        return logits.argmax(-1)


def run(case: TokenCase, seed: int, method: Method | None = None, weights: int = 0) -> tuple[list[list[int]], float]:
    """Return the tokens of each sequence, and the smallest lead of one of them. `method` replaces the case's;
    `weights`: the model's weights, disturbed in the way of that number."""
    batch = case.settings.get("batch", 1)
    prompt = torch.tensor([ids(f"{seed}/{i}") for i in range(batch)])
    watched, loaded = Watched(), model(case.architecture, weights)
    with (
        use_backend("torch"),
        attached(
            loaded,
            method or case.method,
            budget=BUDGET,
            placement=case.placement,  # type: ignore[arg-type]
            calibration=torch.tensor([ids("calibration", CALIBRATION)]),
            reuse_steps=case.settings.get("reuse_steps", 0),
        ) as kv,
    ):
        made = Engine(kv, prefill_chunk=case.settings.get("prefill_chunk")).generate(
            prompt,
            max_new_tokens=NEW,
            context_tokens=PROMPT - QUESTION if case.protocol == "context" else None,
            sampler=watched,
        )
    return made.tokens, min(watched.leads)


def steady(case: TokenCase, seed: int) -> list[list[int]] | None:
    """The tokens of a prompt that is fit to be stored; None where this one is not."""
    tokens, lead = run(case, seed)
    varied = all(len(set(row)) > NEW // 2 for row in tokens)
    shakes = (run(case, seed, weights=number)[0] for number in range(1, SHAKES + 1))
    if lead < LEAD or not varied or any(others != tokens for others in shakes):
        return None
    on_device = TokenCase(preset="full", settings=case.settings, protocol=case.protocol, architecture=case.architecture)
    told_apart = not case.method.uses_budget or run(on_device, seed, Full())[0] != tokens
    return tokens if told_apart else None


def defaults() -> dict[str, Any]:
    return flatten({key: value for key, value in recorded_defaults().items() if key not in WITHOUT_EFFECT})


def stored() -> dict[str, Any]:
    """`core`: the CORE_VERSION that said these tokens; `defaults` of the settings then, dotted; `tokens` by the name of
    the case, with the `seed` of its prompt."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def write(lines: list[str]) -> None:
    head = f'{{"core": {CORE_VERSION},\n"defaults": {json.dumps(defaults())},\n"tokens": {{\n'
    FILE.write_text(head + ",\n".join(lines) + "\n}}\n")


def main() -> None:
    torch.set_num_threads(1)
    lines = []
    for case in cases():
        seed, tokens = next((seed, found) for seed in count() if (found := steady(case, seed)))
        lines.append(f"{json.dumps(case.name)}: {json.dumps({'seed': seed, 'tokens': tokens})}")
        print(lines[-1], flush=True)
    write(lines)


if __name__ == "__main__":
    main()
