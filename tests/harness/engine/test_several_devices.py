"""A model whose layers lie on two devices: every method gives the tokens of one device, and each cache lies with its
layer."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from harness import Engine, RunningBatch, attached
from harness.config.settings import Settings, SettingsError
from harness.jobs import machine
from harness.jobs.evaluate import _placed
from harness.jobs.prefill import Usage
from harness.jobs.resolve import resolve
from harness.models import devices
from harness.models.base import ModelError
from harness.models.hub import check_places
from kernels.dispatch import use_backend
from methods.base import Method
from methods.full import Full
from methods.snapkv import SnapKV
from tests.fast import MODEL
from tests.methods.test_contract import in_places, small
from tests.other_device import CPU, OTHER, move_layers, other_device
from tests.quick import slow_if
from tests.tiny import prompt, saved, tiny

FIRST = 1  # layer on the second device
QUICK = ("full", "h2o", "infinigen", "kivi", "lm_infinite", "pqcache", "shadowkv", "streaming")
PLACES = slow_if(lambda case: case[0] not in QUICK, in_places("device", "host"))


@cache
@torch.inference_mode(mode=False)
def split(architecture: str) -> PreTrainedModel:
    model = deepcopy(tiny(architecture))
    model.config._experts_implementation = "eager"  # others count tokens as a CPU cannot, where the device is no CPU
    move_layers(model, FIRST)
    return model


def answer(model: PreTrainedModel, method: Method, placement: str = "device") -> list[list[int]]:
    budget = 0.4 if method.uses_budget else None
    calibration = prompt(64, seed=9)
    with (
        use_backend("torch"),
        attached(model, method, budget=budget, placement=placement, calibration=calibration) as kv,
    ):
        return Engine(kv, prefill_chunk=None).generate(prompt(90), max_new_tokens=6).tokens


@pytest.mark.parametrize("case", PLACES, ids="-".join)
def test_every_method_gives_the_tokens_of_one_device(case: tuple[str, str]) -> None:
    name, placement = case
    with other_device():
        both = answer(split("llama"), small(name), placement)
    assert both == answer(tiny("llama"), small(name), placement)


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss"])
def test_so_do_models_whose_layers_slide(architecture: str) -> None:
    with other_device():
        both = answer(split(architecture), SnapKV())
    assert both == answer(tiny(architecture), SnapKV())


def test_caches_lie_with_their_layers_and_sequences_attend_alone() -> None:
    prompts = [prompt(40), prompt(70, seed=1)]
    with use_backend("torch"), attached(tiny("llama"), Full()) as kv:
        alone = [Engine(kv).generate(ids, max_new_tokens=5).tokens for ids in prompts]
    with other_device(), use_backend("torch"), attached(split("llama"), Full()) as kv:
        engine = Engine(kv)
        assert engine.forward is None
        assert devices.parts_of(CPU) == [CPU, OTHER]
        assert _placed(kv.model_specs) == {"cpu": "0 to 0", "meta": "1 to 2"}
        batch = RunningBatch(engine)
        slots = [engine.join(batch, ids, max_new_tokens=5) for ids in prompts]
        for slot in slots:
            places = [(layer.request.device, layer.state()["k0"].device) for layer in slot.cache.layers]
            assert places == [(CPU, CPU), (OTHER, OTHER), (OTHER, OTHER)]
        while batch.sequences:
            batch.run()
        assert engine.one_by_one == "the model lies on several devices"
        assert [slot.out.tokens for slot in slots] == alone


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
def test_accelerates_hooks_bring_each_layer_its_input() -> None:
    from accelerate import dispatch_model

    model = deepcopy(tiny("llama"))
    parts = [
        "model.embed_tokens",
        "model.rotary_emb",
        "model.norm",
        "lm_head",
        *(f"model.layers.{n}" for n in range(3)),
    ]
    dispatch_model(model, dict.fromkeys(parts, "cpu"), main_device="cpu", force_hooks=True)
    assert answer(model, Full()) == answer(tiny("llama"), Full())
    with attached(model, Full()) as kv:
        assert "was replaced" in str(Engine(kv).plain_reason)


def test_a_model_that_does_not_fit_into_the_gpus_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    source = replace(saved(tiny("llama"), tmp_path), device_map="auto")
    model: Any = SimpleNamespace(hf_device_map={"model.layers.0": 0, "model.layers.1": "disk", "lm_head": "cpu"})
    with pytest.raises(ModelError, match="would put layers on the cpu and disk"):
        check_places(model, "large")
    with pytest.raises(ModelError, match="device_map=balanced is unknown: set auto"):
        replace(source, device_map="balanced")
    assert source.describe().spread


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cpu"}, "device=cpu is one device: set device=cuda"),
        ({"device": "cuda:1"}, "device=cuda:1 is one device"),
        ({"device": "cuda", "graphs": "on"}, "graphs=on works on one"),
        ({"device": "cuda", "trace": "on"}, "trace=on works on one"),
        ({"device": "cuda", "history": "store"}, "history=store works on one"),
    ],
)
def test_what_works_on_one_gpu_alone_is_refused(settings: dict[str, Any], message: str) -> None:
    info = replace(MODEL.describe(), spread=True)
    with pytest.raises(SettingsError, match=message):
        resolve(Settings(**settings), Full(), info)
    assert resolve(Settings(device="cuda"), Full(), info).settings.graphs == "off"


def test_memory_and_clocks_count_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus, seen = [torch.device("cuda", number) for number in range(2)], []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(machine, "free_bytes", lambda name: {"cuda:0": 3, "cuda:1": 4, "cpu": 9}[name])
    assert machine.free_here("cuda", spread=True) == (7, 9)
    monkeypatch.setattr(devices, "_several", [])
    devices.note_devices({*gpus})
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", seen.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda gpu: 10 + gpu.index)
    with Usage(gpus[0]) as usage:
        devices.wait_for(gpus[0])
    assert (seen, usage.device_bytes) == (gpus * 2, 21)
    devices.note_devices({CPU})
    assert devices.parts_of(gpus[1]) == [gpus[1]]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: gpu)
    assert [devices.current(gpu) == gpu for gpu in (CPU, *gpus)] == [False, False, True]  # whatever was noted last
