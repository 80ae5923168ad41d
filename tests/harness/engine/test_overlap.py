"""Rows that come while the model computes: the same tokens and traffic as without, and as much hidden as can be."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.engine.attach import Attachment, attached
from harness.engine.engine import Engine
from kernels import ops
from methods.base import CacheState, KVLayer, Method
from methods.full import Full
from methods.infinigen import InfiniGen
from methods.infllm import InfLLM
from methods.kivi import Kivi
from methods.shadowkv import ShadowKV
from methods.tiers.transfer import TransferEngine
from tests.fast import PQ
from tests.methods.synthetic import Sequences, Shape
from tests.methods.test_contract import NAMES, small
from tests.tiny import prompt, tiny
from tests.virtual_time import VirtualEngine

OFFLOADING = [name for name in NAMES if small(name).offloads]


def attach(name: str | Method, placement: str, overlap: bool, disk: Path | None = None) -> Any:
    method = small(name) if isinstance(name, str) else name
    if isinstance(method, Kivi):
        method = replace(method, group=16, residual=32)  # so short a prompt has codes
    return attached(
        tiny("llama"), method, budget=0.4 if method.uses_budget else None, placement=placement,
        calibration=prompt(64, seed=9), disk=disk, overlap=overlap,
    )  # fmt: skip


def answers(kv: Attachment, turns: int = 2) -> list[tuple[list[list[int]], float, dict[str, int]]]:
    """What two prompts and a further turn of the second give: tokens, bytes that a step moves, bytes by tier."""
    engine, seen = Engine(kv), []
    for length in (60, 83):
        out = engine.generate(prompt(length, seed=length), max_new_tokens=7)
        seen.append((out.tokens, out.measured["moved_bytes_per_step"], out.kv))
    return seen


@pytest.mark.tokens
@pytest.mark.parametrize("placement", ["host", "disk"])
@pytest.mark.parametrize("name", OFFLOADING)
def test_tokens_and_traffic_are_those_without_overlap(name: str, placement: str, tmp_path: Path) -> None:
    with attach(name, placement, overlap=False, disk=tmp_path) as kv:
        plain = answers(kv)
    before = set(threading.enumerate())
    with attach(name, placement, overlap=True, disk=tmp_path) as kv:
        beside = answers(kv)
    assert set(threading.enumerate()) <= before
    assert [one[:2] for one in beside] == [one[:2] for one in plain]
    gc.collect()
    assert not list(tmp_path.glob("*"))


@pytest.mark.parametrize(("placement", "staged"), [("disk", 1), ("host", 0)])
def test_what_is_on_its_way_counts_as_device_memory(placement: str, staged: int, tmp_path: Path) -> None:
    """Behind the last step the first layer's prompt has come for the next one: beside a CPU, that of the host is a view
    of what lies there."""
    with attach("full_offloaded", placement, overlap=False, disk=tmp_path) as kv:
        ((_, _, plain), *_) = answers(kv)
    with attach("full_offloaded", placement, overlap=True, disk=tmp_path) as kv:
        kv.engine = TransferEngine()  # rows come when they are asked for, and not when a thread gets to it
        ((_, _, beside), *_) = answers(kv)
    spec = kv.specs[0]
    assert beside[placement] == plain[placement]
    assert beside["device"] - plain["device"] == staged * 2 * 60 * spec.num_kv_heads * spec.head_dim * 4


LAYERS, LENGTH, STEPS = 6, 260, 4
VIRTUAL = {  # methods, and the operation behind which their rows can hide, None: the work between two layers
    "full": (Full(offload=True), None),
    "infinigen": (InfiniGen(dense_layers=(0,), calibration_tokens=16, skew=False, alpha=99.0), None),
    "shadowkv": (ShadowKV(chunk=4, rank=16, local_chunks=2), "rebuild_keys"),
    "infllm": (InfLLM(n_init=4, block=8, exc_block=16), "segment_attention_with_lse"),
}


def virtual(method: Method, engine: VirtualEngine, ahead: bool = True) -> tuple[list[KVLayer], Sequences, CacheState]:
    sequences = Sequences(Shape(4, 2, 16), LENGTH, LAYERS)
    request = replace(sequences.request(0.5 if method.uses_budget else None), placement="host")
    state = CacheState(request, engine=engine, ahead=ahead)
    return method.start(sequences.specs, state), sequences, state


@pytest.mark.parametrize("share", [0.5, 1.0, 2.0])
def test_pqcache_clusters_behind_later_layers(share: float) -> None:
    """Where clustering a layer takes `share` of computing one, TTFT holds none of it, and TT2T is TTFT, what the worker
    still has to do then, and the step."""
    compute, prompt_tokens = 1.0, LENGTH - STEPS
    engine = VirtualEngine(work_s=share * compute)
    layers, sequences, _ = virtual(PQ, engine)
    for index, layer in enumerate(layers):
        layer.prefill(sequences.at(index, 0, prompt_tokens))
        engine.compute(compute)
        layer.seal()
    assert engine.time == LAYERS * compute  # TTFT
    for index, layer in enumerate(layers):
        layer.decode(sequences.at(index, prompt_tokens, prompt_tokens + 1))
        engine.compute(compute)
    clustered, now, backlog = 0.0, LAYERS * compute, 0.0
    for index in range(LAYERS):
        clustered = max(clustered, (index + 1) * compute) + share * compute
        backlog += max(0.0, clustered - now)
        now = max(now, clustered) + compute
    assert engine.time == pytest.approx(LAYERS * compute + backlog + LAYERS * compute)
    assert engine.exposed_s == 0.0


def test_blocks_of_pqcaches_cache_come_behind_the_rest_of_a_step() -> None:
    """What a step waits for is its misses."""
    method = replace(PQ, cache_tokens=64, cache_block=8, cache_offered=2)

    def waited(ahead: bool) -> tuple[float, int]:
        engine = VirtualEngine(1e6)
        layers, sequences, state = virtual(method, engine, ahead)
        sequences.seal(layers, 0, LENGTH - STEPS)
        for position in range(LENGTH - STEPS, LENGTH):
            for index, layer in enumerate(layers):
                layer.decode(sequences.at(index, position, position + 1))
                engine.compute(1.0)
        return engine.exposed_s, state.traffic.settle().to_device_bytes

    (off, moved), (on, same) = waited(False), waited(True)
    missed = int(off * 1e6)
    assert (missed, same) == (moved, moved)
    assert 0 < on < off


def step_seconds(
    name: str, ahead: bool, rate: float, compute: float, monkeypatch: pytest.MonkeyPatch
) -> Iterator[float]:
    """Of each decode step, in virtual time: every layer computes for `compute` seconds."""
    method, behind = VIRTUAL[name]
    engine = VirtualEngine(rate)
    layers, sequences, _ = virtual(method, engine, ahead)
    sequences.seal(layers, 0, LENGTH - STEPS)
    if behind is not None:
        run, calls = getattr(ops, behind), []

        def timed(*given: Any, **named: Any) -> Any:
            calls.append(1)
            if behind != "segment_attention_with_lse" or len(calls) % 2:  # InfLLM: its window comes first
                engine.compute(compute)
            return run(*given, **named)

        monkeypatch.setattr(ops, behind, timed)
    for position in range(LENGTH - STEPS, LENGTH):
        began = engine.time
        for index, layer in enumerate(layers):
            layer.decode(sequences.at(index, position, position + 1))
            if behind is None:
                engine.compute(compute)
        yield engine.time - began


@pytest.mark.parametrize("share", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", VIRTUAL)
def test_each_schedule_hides_what_it_can(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's transfer takes `share` of the work behind which it may hide."""
    compute = 1.0
    with monkeypatch.context() as patch:
        exposed = list(step_seconds(name, False, 1e6, compute, patch))[-1]  # bytes of a step at a known rate
    transfer = (exposed - LAYERS * compute) * 1e6  # bytes of a step
    moving = LAYERS - 1 if name == "infinigen" else LAYERS  # its first layer is dense, and stays
    rate = transfer / moving / (share * compute)
    with monkeypatch.context() as patch:
        off = list(step_seconds(name, False, rate, compute, patch))[-1]
    with monkeypatch.context() as patch:
        on = list(step_seconds(name, True, rate, compute, patch))[-1]
    assert off == pytest.approx(LAYERS * compute + moving * share * compute)
    hideable = moving * min(share, 1.0) * compute
    assert off - on >= 0.95 * hideable
    if name in ("full", "infinigen"):
        assert on <= 1.05 * (LAYERS * max(compute, share * compute) + share * compute)
