"""What a run takes on the CPU, prefill, seal and a step, is what was forecast before it: a new yaml is tested by being
there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from harness.config.plugins import build
from harness.config.settings import Settings
from harness.engine.attach import attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.jobs.planning.capacity import Holder, Need, needed
from harness.jobs.planning.items import Item, prepare
from harness.models.base import ModelInfo
from methods.base import Budget, Method
from tests.allocations import Allocations
from tests.fast import MODEL, niah
from tests.methods.test_contract import NAMES, _yaml
from tests.quick import mostly_slow
from tests.tiny import SHAPE

PROMPT, NEW, LAYERS = 2800, 4, 8
FLOOR = 16 * 2**20  # below it nothing is promised
WIDE = SHAPE | {
    "hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": LAYERS, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 32,
}  # fmt: skip
QUICK = [  # where most lies beside keys and values
    ("full", "device", None), ("h2o", "device", None), ("infllm", "device", None), ("infinigen", "host", 300),
    ("kivi", "device", 300), ("lm_infinite", "device", None), ("pqcache", "device", 300), ("rocketkv", "host", 300),
    ("shadowkv", "host", 300), ("snapkv", "device", 300), ("sparq", "host", 300),
]  # fmt: skip


@cache
@torch.inference_mode(mode=False)
def model() -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **WIDE), dtype=torch.float32).eval()


def info() -> ModelInfo:
    return replace(
        MODEL.describe(), num_layers=LAYERS, num_heads=6, num_kv_heads=3, head_dim=32, hidden_size=192, inner_size=192,
        layer_windows=(None,) * LAYERS,
    )  # fmt: skip


@cache
def item() -> Item:
    first = prepare(niah(), MODEL, Settings(device="cpu"))[0]
    return replace(first, prompt=replace(first.prompt, ids=(7,) * PROMPT, split=PROMPT), new_tokens=NEW)


def method_of(name: str) -> Method:
    method: Method = build(_yaml(name), "method")
    return replace(method, dense_layers=(0,)) if hasattr(method, "dense_layers") else method  # type: ignore[type-var]


@torch.inference_mode()
def peak(holder: Holder) -> int:
    settings = holder.settings
    ids = torch.randint(3, WIDE["vocab_size"], (1, PROMPT), generator=torch.Generator().manual_seed(0))
    how = {"budget": holder.budget, "placement": settings.placement, "calibration": ids}
    with attached(model(), holder.method, **how) as kv, Allocations() as counted:  # type: ignore[arg-type]
        engine = Engine(kv, prefill_chunk=settings.prefill_chunk)
        cache = kv.start(KVCache, capacity=PROMPT + NEW)
        engine.prefill(cache, ids)
        cache.seal()
        engine.run(ids[:, :1], cache)
    return counted.peak


def forecast(holder: Holder) -> Need:
    return needed(info(), holder, [item()], loaded=True)


def holder_of(name: str, placement: str = "device", chunk: int | None = None, **parameters: object) -> Holder:
    method = replace(method_of(name), **parameters)  # type: ignore[type-var]
    settings = Settings(device="cpu", dtype="fp32", placement=placement, prefill_chunk=chunk)
    return Holder(settings, method, Budget(0.2) if method.uses_budget else None)


def assert_foreseen(holder: Holder) -> None:
    real = peak(holder)
    assert real > FLOOR
    assert forecast(holder).total == pytest.approx(real, rel=0.1)


CASES = [
    (name, place, chunk)
    for name in NAMES
    for place in ("device", "host", "disk")
    for chunk in (None, 300)
    if place == "device" or method_of(name).offloads
]


@pytest.mark.parametrize("case", mostly_slow(CASES, *QUICK), ids=lambda case: "-".join(map(str, case)))
def test_the_peak_is_what_was_forecast(case: tuple[str, str, int | None]) -> None:
    """Chunks make the prefill small, so that the seal is what counts."""
    assert_foreseen(holder_of(*case))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "placement", "parameters"),
    [
        ("infinigen", "device", {"pool_capacity": 0.8}),
        ("infinigen", "host", {"pool_capacity": 0.8, "pool_policy": "fifo"}),
        ("infinigen", "device", {"skew": False, "column_rule": "query"}),
        ("infllm", "device", {"block": 64}),
        ("pqcache", "host", {"b": 6, "m": 4}),
        ("quest", "device", {"page_size": 4}),
        ("shadowkv", "device", {"solver": "thin_svd"}),
        ("snapkv", "device", {"select_per": "query_head"}),
        ("sparq", "host", {"channel_copy": False}),
    ],
    ids=str,
)
def test_parameters_count(name: str, placement: str, parameters: dict[str, object]) -> None:
    for chunk in (None, 300):
        assert_foreseen(holder_of(name, placement, chunk, **parameters))
