"""What a recorded step says is what the step did, and nothing of it depends on how busy the machine is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import pytest
import torch

from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.trace import Tracer
from harness.machines.recorder import recorded
from harness.machines.schedule import (
    DISK_LANE,
    TO_DEVICE,
    LayerBorder,
    Operation,
    ScheduleEvent,
    Submitted,
    Waited,
    launches,
)
from methods.tiers.transfer.links import Links
from tests.methods.test_contract import attach, small
from tests.tiny import prompt, tiny

TOKEN = torch.full((1, 1), 5)


def sealed(kv: Attachment, *, steps: int = 1) -> tuple[Engine, KVCache]:
    """A cache behind its first steps."""
    engine, ids = Engine(kv), prompt(80)
    cache = engine.cache(ids, 8)
    engine.prefill(cache, ids)
    cache.seal()
    for _ in range(steps):
        engine.decode(TOKEN, cache, None)
    return engine, cache


@torch.inference_mode()
def step_of(name: str, placement: str = "device") -> list[ScheduleEvent]:
    with attach(small(name), 0.5, placement=placement) as kv:
        engine, cache = sealed(kv)
        with recorded(cache.method_layers) as schedule:
            engine.decode(TOKEN, cache, None)
    return schedule


@contextmanager
def busy() -> Iterator[None]:
    """Two more threads that compute all the time."""
    over = Event()

    def work() -> None:
        while not over.is_set():
            torch.ones(200, 200) @ torch.ones(200, 200)

    threads = [Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    ("name", "placement"), [("full", "device"), ("pqcache", "host"), ("shadowkv", "disk"), ("infinigen", "host")]
)
def test_two_recordings_of_a_step_are_equal_under_any_load(name: str, placement: str) -> None:
    first = step_of(name, placement)
    with busy():
        assert step_of(name, placement) == first
    borders = [event.layer for event in first if isinstance(event, LayerBorder)]
    assert borders == list(range(tiny("llama").config.num_hidden_layers))


@pytest.mark.parametrize(("name", "placement"), [("quest", "host"), ("sparq", "disk"), ("full_offloaded", "host")])
@torch.inference_mode()
def test_transfers_are_what_the_traffic_counts(name: str, placement: str) -> None:
    """In the first step: rows that an earlier one has asked for are not seen."""
    with attach(small(name), 0.5, placement=placement) as kv:
        engine, cache = sealed(kv, steps=0)
        before = cache.traffic.to_device_bytes
        with recorded(cache.method_layers) as schedule:
            engine.decode(TOKEN, cache, None)
        moved = cache.traffic.to_device_bytes - before
    came = [event for event in schedule if isinstance(event, Submitted) and event.lane == TO_DEVICE]
    assert sum(event.nbytes for event in came) == moved > 0
    read = [event for event in schedule if isinstance(event, Submitted) and event.lane == DISK_LANE]
    assert sum(event.nbytes for event in read) == (moved if placement == "disk" else 0)
    waited = {event.key for event in schedule if isinstance(event, Waited)}
    assert waited == {event.key for event in came}
    assert all(event.after for event in came) == (placement == "disk")


@pytest.mark.parametrize("name", ["full", "pqcache", "snapkv"])
@torch.inference_mode()
def test_operations_read_what_a_trace_counts(name: str) -> None:
    """Keys and values that are attended to, and the codes of PQCache."""
    with attach(small(name), 0.5) as kv:
        engine, cache = sealed(kv)
        with recorded(cache.method_layers) as schedule:
            engine.decode(TOKEN, cache, None)
        tracer = Tracer(torch.device("cpu"))
        with tracer.step(cache):
            engine.decode(TOKEN, cache, None)
        one_token_more = sum(layer.cache.request.dtype.itemsize * 2 * 2 * 16 for layer in cache.method_layers)
        counted = tracer.bytes_read(cache)
    names = ("segment_attention", "pq_weights")
    read = sum(event.read for event in schedule if isinstance(event, Operation) and event.name in names)
    assert read == counted - one_token_more


def test_a_layer_launches_its_operations() -> None:
    """Beside two copies of the new token's key and value: norm and projections, attention, the rest of the block."""
    layers = tiny("llama").config.num_hidden_layers
    counts = launches(step_of("full"))
    for operation in ("attention_inputs", "segment_attention", "block_output"):
        assert counts[operation] == layers
    assert counts["token_logits"] == 1
    product = next(event for event in step_of("full") if isinstance(event, Operation) and event.name == "token_logits")
    weights = tiny("llama").get_output_embeddings().weight
    assert (product.flop, product.read) == (2 * weights.numel(), weights.nbytes)


def events_of_overlap(name: str, *, overlap: bool) -> list[ScheduleEvent]:
    """Of the first step of a cache whose rows lie on the host, over a link that is arithmetic."""
    how: dict[str, Any] = {"overlap": True, "links": Links(1e12)} if overlap else {}
    calibration = prompt(64, seed=9)
    with (
        torch.inference_mode(),
        attached(tiny("llama"), small(name), budget=0.5, placement="host", calibration=calibration, **how) as kv,
    ):
        engine, cache = sealed(kv, steps=0)
        with recorded(cache.method_layers) as schedule:
            engine.decode(TOKEN, cache, None)
    return schedule


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["full_offloaded", "infinigen", "shadowkv", "pqcache", "quest"])
def test_rows_are_submitted_where_they_are_asked_for(name: str, overlap: bool) -> None:
    """With overlap those of Full and InfiniGen before the layer that waits for them, ShadowKV's before its keys are
    rebuilt; PQCache waits at once."""
    schedule = events_of_overlap(name, overlap=overlap)
    layer, asked = -1, dict[int, int]()  # key -> the layer that has asked
    layers_ahead, beside = set[int](), set[str]()
    for place, event in enumerate(schedule):
        if isinstance(event, LayerBorder):
            layer = event.layer
        elif isinstance(event, Submitted):
            asked[event.key] = layer
        elif isinstance(event, Waited):
            layers_ahead.add(layer - asked[event.key])
            start = next(i for i, e in enumerate(schedule) if isinstance(e, Submitted) and e.key == event.key)
            beside |= {e.name for e in schedule[start:place] if isinstance(e, Operation)}
    assert (max(layers_ahead) == 1) == (overlap and small(name).asks_ahead)
    assert ("rebuild_keys" in beside) == (overlap and name == "shadowkv")
    assert bool(beside) == (overlap and name not in ("pqcache", "quest"))


@torch.inference_mode()
def test_threads_that_move_rows_are_not_recorded() -> None:
    with attached(tiny("llama"), small("quest"), budget=0.5, placement="host", overlap=True) as kv:
        _, cache = sealed(kv)
        with pytest.raises(ValueError, match="record with overlap=off, or with links"), recorded(cache.method_layers):
            pass
