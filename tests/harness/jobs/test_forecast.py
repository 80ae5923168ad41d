"""What a run takes on the CPU, prefill, seal and a step, is what was forecast before it: a new yaml is tested by being
there."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from harness.config.plugins import build
from harness.config.settings import Settings
from harness.engine.attach import Attachment
from harness.engine.batch.running import RunningBatch
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.hf import routed
from harness.jobs.examples import PreparedExample, prepare
from harness.jobs.memory import CacheSpec, MemoryForecast, needed
from harness.jobs.prefill import SharedPrefill
from harness.models.base import ModelInfo
from kernels import ops
from methods.base import Budget, Method
from methods.tiers.tier import DEVICE, DISK, HOST
from tests.allocations import Allocations
from tests.fast import MODEL, niah
from tests.methods.test_contract import NAMES, _yaml
from tests.quick import mostly_slow
from tests.tiny import SHAPE

PROMPT, NEW, LAYERS = 2800, 4, 8
FLOOR = 16 * 2**20  # below it nothing is promised, though it holds where little is left on the device
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
    ("h2o", "device", None), ("infllm", "device", None), ("infinigen", "host", 300), ("kivi", "device", 300),
    ("lm_infinite", "device", None), ("shadowkv", "host", 300), ("snapkv", "device", 300), ("sparq", "host", 300),
]  # fmt: skip


@cache
@torch.inference_mode(mode=False)
def model() -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **WIDE), dtype=torch.float32).eval()


def info() -> ModelInfo:
    return replace(
        MODEL.describe(), num_layers=LAYERS, num_heads=6, num_kv_heads=3, head_dim=32, rotary_dim=32, hidden_size=192,
        inner_size=192, layer_windows=(None,) * LAYERS,
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
    return Attachment(of or model(), cache_spec.method, cache_spec.budget, placement, ids(0), 0, None, None)


def peaks(cache_spec: CacheSpec, further: int = 0) -> Allocations:
    """Bytes at most in a turn, and in one more of `further` tokens."""
    attachment = attach(cache_spec)
    with Allocations() as counted:
        take_turns(attachment, cache_spec, further)
    return counted


@torch.inference_mode()
def take_turns(attachment: Attachment, cache_spec: CacheSpec, further: int = 0) -> None:
    with routed(attachment.model):
        engine = Engine(attachment, prefill_chunk=cache_spec.settings.prefill_chunk)
        cache = attachment.start(KVCache, capacity=PROMPT + NEW + (further and further + NEW))
        for tokens in (PROMPT, further) if further else (PROMPT,):
            cache.open_turn()
            engine.prefill(cache, ids(1, tokens).to(attachment.model.device), whole=True)
            cache.seal()
            engine.run(ids(2, 1).to(attachment.model.device), cache)


def forecast(cache_spec: CacheSpec) -> MemoryForecast:
    return needed(info(), cache_spec, [item()] * cache_spec.settings.batch, loaded=True)


def holder_of(name: str, placement: str = "device", chunk: int | None = None, **parameters: object) -> CacheSpec:
    method = replace(method_of(name), **parameters)  # type: ignore[type-var]
    settings = Settings(device="cpu", dtype="fp32", placement=placement, prefill_chunk=chunk)
    return CacheSpec(settings, method, Budget(0.2) if method.uses_budget else None)


def changed(cache_spec: CacheSpec, **settings: object) -> CacheSpec:
    return cache_spec._replace(settings=replace(cache_spec.settings, **settings))  # type: ignore[arg-type]


def assert_foreseen(cache_spec: CacheSpec) -> None:
    """On a CPU host memory is the device's. What lies on the device alone is forecast where the rest is in files, and
    what lies in host memory beside a GPU."""
    real = peaks(cache_spec)
    assert forecast(cache_spec).total == pytest.approx(real.peak, rel=0.1)
    if cache_spec.settings.placement == DEVICE:
        assert real.peak > FLOOR
        return
    assert forecast(changed(cache_spec, placement=DISK)).total == pytest.approx(real.peaks[DEVICE], rel=0.1)
    if cache_spec.settings.placement == HOST:
        assert forecast(changed(cache_spec, device="cuda")).host == pytest.approx(real.peaks[HOST], rel=0.1)


CASES = [
    (name, place, chunk)
    for name in NAMES
    for place in ("device", "host", "disk")
    for chunk in (None, 300)
    if place == "device" or method_of(name).offloads
]


@pytest.mark.parametrize("case", mostly_slow(CASES, *QUICK), ids=lambda case: "-".join(map(str, case)))
def test_the_peak_is_what_was_forecast(case: tuple[str, str, int | None]) -> None:
    """Chunks make the prefill small, so that the seal is what counts. What a press takes while it works is known as a
    bound alone."""
    cache_spec = holder_of(*case)
    if case[0] == "kvpress":
        real = peaks(cache_spec).peak
        assert 0.9 * real <= forecast(cache_spec).total <= 1.3 * real
        return
    assert_foreseen(cache_spec)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("case", [case for case in QUICK if case[0] != "lm_infinite"], ids=str)
def test_the_peak_on_a_gpu_is_what_was_forecast(case: tuple[str, str, int | None]) -> None:
    """As torch's allocator counts it: no more than was said, above the floor."""
    cache_spec, device = changed(holder_of(*case), device="cuda"), torch.device("cuda")
    attachment = attach(cache_spec, deepcopy(model()).to(device))  # type: ignore[arg-type]
    take_turns(attachment, cache_spec)  # compiles, and takes what stays with the device
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    take_turns(attachment, cache_spec)
    assert torch.cuda.max_memory_allocated() - before <= max(1.1 * forecast(cache_spec).total, FLOOR)


@pytest.mark.parametrize(
    "place", mostly_slow([("h2o", "device"), ("pqcache", "host")], ("h2o", "device")), ids="-".join
)
@torch.inference_mode()
def test_the_others_of_a_batch_are_sealed(place: tuple[str, str]) -> None:
    cache_spec = holder_of(*place, 300)
    cache_spec = cache_spec._replace(settings=replace(cache_spec.settings, batch=2))
    attachment = attach(cache_spec)
    with routed(model()), Allocations() as counted:
        engine = Engine(attachment, prefill_chunk=300)
        batch = RunningBatch(engine)
        for seed in range(2):
            engine.join(batch, ids(seed), max_new_tokens=NEW)
            batch.step()
    assert needed(info(), cache_spec, [item()] * 2, loaded=True).total == pytest.approx(counted.peak, rel=0.1)


@pytest.mark.parametrize("name", ["full_offloaded", "shadowkv"])
@torch.inference_mode()
def test_a_step_of_three_whose_rows_come_together_is_foreseen(name: str) -> None:
    """The rows of one layer come for all of them, and a joint copy of their hit caches is there."""
    cache_spec = changed(holder_of(name, HOST, 300), batch=3)
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
    assert forecast(cache_spec).total == pytest.approx(counted.peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 300])
@torch.inference_mode()
def test_jobs_that_share_a_prefill(chunk: int | None) -> None:
    """None is sealed before all are filled."""
    cache_specs = [holder_of(name, placement, chunk) for name, placement in (("infinigen", "host"), ("h2o", "device"))]
    shared = [one._replace(settings=replace(one.settings, shared_prefill=True)) for one in cache_specs]
    attachments = [attach(one) for one in cache_specs]
    with routed(model()), Allocations() as counted:
        engines = [Engine(attachment, prefill_chunk=chunk) for attachment in attachments]
        prefill = SharedPrefill(engines[0], ids(1), NEW)
        caches = [prefill.cache(engine, lambda layer, x: layer.absorb(x)) for engine in engines]
        prefill.run(PROMPT)
        for cache in caches:
            cache.seal()
    told = needed(info(), shared[0], [item()], loaded=True, beside=shared[1:])
    assert told.total == pytest.approx(counted.peak, rel=0.1)
