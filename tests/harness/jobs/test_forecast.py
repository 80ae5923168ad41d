"""What a run takes on the CPU in prefill, seal and a step is at most what was forecast: a new yaml is tested by being
there."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from harness import Engine, RunningBatch
from harness.config.plugins import build
from harness.config.settings import Settings
from harness.engine.attach import Attachment
from harness.engine.attach_options import AttachOptions
from harness.engine.cache import KVCache
from harness.engine.hf import routed
from harness.jobs.examples import PreparedExample, prepare
from harness.jobs.memory import CacheSpec, MemoryForecast, needed
from harness.models.base import ModelInfo
from harness.models.probe import Heads
from kernels import ops
from methods.base import Budget, Method
from methods.tiers.tier import DEVICE, DISK, HOST, TIERS
from tests.allocations import Allocations
from tests.fast import MODEL, niah
from tests.methods.test_contract import NAMES, _yaml
from tests.quick import mostly_slow
from tests.tiny import SHAPE

PROMPT, NEW, LAYERS = 2800, 4, 8
WIDE = SHAPE | {
    "hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": LAYERS, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 32,
}  # fmt: skip
SMALL = torch.zeros(1, 2, 64, 32)
REFUSAL = ops.windowed_attention.refusal("cpu", SMALL, SMALL, SMALL, 1.0, 0, 8)
pytestmark = pytest.mark.skipif(
    REFUSAL is not None, reason=f"torch's own kernels take blocks of up to 16 MiB: {REFUSAL}"
)
QUICK = [  # where most lies beside keys and values
    ("h2o", "device"), ("infllm", "device"), ("infinigen", "host"), ("kivi", "device"), ("lm_infinite", "device"),
    ("rkv", "device"), ("shadowkv", "host"), ("snapkv", "device"), ("sparq", "host"),
]  # fmt: skip


@cache
@torch.inference_mode(mode=False)
def model() -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **WIDE), dtype=torch.float32).eval()


def info() -> ModelInfo:
    return replace(
        MODEL.describe(), num_layers=LAYERS, layer_heads=(Heads(6, 3, 32, 32),) * LAYERS, rotary_dim=32,
        hidden_size=192, inner_size=192, layer_windows=(None,) * LAYERS,
    )  # fmt: skip


@cache
def item() -> PreparedExample:
    first = prepare(niah(), MODEL, Settings(device="cpu"))[0]
    return replace(first, prompt=replace(first.prompt, ids=(7,) * PROMPT, split=PROMPT), new_tokens=NEW)


def method_of(name: str) -> Method:
    method: Method = build(_yaml(name), "method")
    return replace(method, dense_layers=(0,)) if hasattr(method, "dense_layers") else method  # type: ignore[type-var]


def ids(seed: int, tokens: int = PROMPT) -> Tensor:
    return torch.randint(3, WIDE["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(seed))


def attach(cache_spec: CacheSpec, of: PreTrainedModel | None = None) -> Attachment:
    placement = cache_spec.settings.placement
    options = AttachOptions(budget=cache_spec.budget, placement=placement, calibration=ids(0))
    return Attachment(of or model(), cache_spec.method, options)


def peaks(cache_spec: CacheSpec) -> Allocations:
    """Bytes at most in a turn."""
    attachment = attach(cache_spec)
    with Allocations() as counted:
        take_turn(attachment, cache_spec)
    return counted


@torch.inference_mode()
def take_turn(attachment: Attachment, cache_spec: CacheSpec) -> None:
    with routed(attachment.model):
        engine = Engine(attachment, prefill_chunk=cache_spec.settings.prefill_chunk)
        cache = attachment.start(KVCache, capacity=PROMPT + NEW)
        cache.open_turn()
        engine.prefill(cache, ids(1).to(attachment.model.device), whole=True)
        cache.seal()
        engine.run(ids(2, 1).to(attachment.model.device), cache)


def assert_nearly(kind: PreTrainedModel, of: ModelInfo, chunk: int | None) -> None:
    """Hold the peak of a turn of Full on another model against its forecast."""
    cache_spec = holder_of("full", chunk=chunk)
    attachment = Attachment(kind, cache_spec.method)
    with Allocations() as counted:
        take_turn(attachment, cache_spec)
    told = needed(of, cache_spec, [item()], loaded=True)
    assert told.total - told.margin == pytest.approx(counted.peak, rel=0.1)


def forecast(cache_spec: CacheSpec) -> MemoryForecast:
    return needed(info(), cache_spec, [item()] * cache_spec.settings.batch, loaded=True)


def holder_of(name: str, placement: str = "device", chunk: int | None = 300, **parameters: object) -> CacheSpec:
    method = replace(method_of(name), **parameters)  # type: ignore[type-var]
    settings = Settings(device="cpu", dtype="fp32", placement=placement, prefill_chunk=chunk)
    return CacheSpec(settings, method, Budget(0.2) if method.uses_budget else None)


def changed(cache_spec: CacheSpec, **settings: object) -> CacheSpec:
    return cache_spec._replace(settings=replace(cache_spec.settings, **settings))  # type: ignore[arg-type]


def assert_foreseen(told: MemoryForecast, peak: int) -> None:
    assert 0.5 * peak <= told.total - told.margin <= 1.2 * peak
    assert peak <= told.total


CASES = [(name, place) for name in NAMES for place in TIERS if place == DEVICE or method_of(name).offloads]


@pytest.mark.parametrize("case", mostly_slow(CASES, *QUICK), ids="-".join)
def test_the_peak_is_at_most_what_was_forecast(case: tuple[str, str]) -> None:
    """On a CPU host memory is the device's. What lies on the device alone is forecast where the rest is in files, and
    what lies in host memory beside a GPU. Chunks make the prefill small, so that the seal is what counts."""
    cache_spec = holder_of(*case)
    real = peaks(cache_spec)
    assert_foreseen(forecast(cache_spec), real.peak)
    if case[1] != DEVICE:
        assert_foreseen(forecast(changed(cache_spec, placement=DISK)), real.peaks[DEVICE])
    if case[1] == HOST:
        assert forecast(changed(cache_spec, device="cuda")).host == pytest.approx(real.peaks[HOST], rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("case", [case for case in QUICK if case[0] != "lm_infinite"], ids=str)
def test_the_peak_on_a_gpu_is_at_most_what_was_forecast(case: tuple[str, str]) -> None:
    """As torch's allocator counts it."""
    cache_spec, device = changed(holder_of(*case), device="cuda"), torch.device("cuda")
    attachment = attach(cache_spec, deepcopy(model()).to(device))  # type: ignore[arg-type]
    take_turn(attachment, cache_spec)  # compiles, and takes what stays with the device
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    take_turn(attachment, cache_spec)
    assert torch.cuda.max_memory_allocated() - before <= forecast(cache_spec).total


@pytest.mark.parametrize("name", ["full_offloaded", "shadowkv"])
@torch.inference_mode()
def test_a_step_of_three_whose_rows_come_together_is_foreseen(name: str) -> None:
    """The rows of one layer come for all of them, and a joint copy of their hit caches is there."""
    cache_spec = changed(holder_of(name, HOST), batch=3)
    attachment = attach(cache_spec)
    with routed(model()):
        engine = Engine(attachment, prefill_chunk=300)
        engine.generate(ids(4, 600), max_new_tokens=2)  # is checked, one sequence after the other
        with Allocations() as counted:
            batch = RunningBatch(engine)
            for seed in range(3):
                engine.join(batch, ids(seed), max_new_tokens=NEW)
            batch.step()
    assert engine.one_by_one is None
    assert_foreseen(forecast(cache_spec), counted.peak)
