"""What the engine is given, its phases, stops, further turns, and its times on a device that works later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from harness import Engine, RunningBatch, attached
from harness.engine import engine as engine_module
from harness.engine import graph as graph_module
from harness.engine.batch import running as running_module
from harness.engine.batch import running_sequence as slot_module
from harness.engine.batch.running_sequence import UNION_EVERY, Generation, RunningSequence
from harness.engine.hf import KVCache
from harness.engine.sampling import Greedy, Sampled
from kernels.dispatch import use_backend
from methods.base import AttnInput, BudgetError
from methods.full import Full
from methods.layers import Layer
from methods.quest import Quest
from methods.snapkv import SnapKV
from tests.tape import Tape
from tests.tiny import prompt, tiny

IDS = torch.ones(1, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("ids", "more"),
    [("a text", {}), ([[1, 2, 3]], {}), (IDS[0], {}), (IDS[:, :0], {}), (IDS.float(), {}), (IDS, {"max_new_tokens": 0})]
    + [(IDS, {"context_tokens": count}) for count in (0, -1, 4)],
)
def test_what_is_no_prompt_is_refused(ids: Any, more: dict[str, int]) -> None:
    wrong = next(iter(more), "prompt")
    with attached(tiny("llama"), Full()) as kv, pytest.raises(ValueError, match=wrong):
        Engine(kv).generate(ids, **{"max_new_tokens": 2} | more)


@pytest.mark.parametrize(
    ("method", "budget", "error", "wrong"),
    [
        ("snapkv", 0.2, ValueError, "'snapkv'"),
        (SnapKV, 0.2, ValueError, "SnapKV is a class"),
        *((SnapKV(), budget, BudgetError, "budget=") for budget in (None, "0.2", True, [0.2], 2.0)),
    ],
)
def test_methods_and_budgets_that_are_none_are_refused(method: Any, budget: Any, error: Any, wrong: str) -> None:
    with pytest.raises(error, match=wrong), attached(tiny("llama"), method, budget=budget):
        pass


def unions(cache: KVCache) -> list[float]:
    """Distinct tokens per KV head in the last step, of every layer but the first."""
    rows = [layer.reads.rows.unflatten(1, (2, -1)).flatten(2).tolist() for layer in cache.layers[1:]]  # type: ignore[union-attr]
    return [fmean(len(set(head)) for sequence in layer_rows for head in sequence) for layer_rows in rows]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("select_per", ["query_head", "kv_head"])
def test_the_union_is_what_a_kv_head_reads_over_its_query_heads(
    batch: int, select_per: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = Quest(page_size=4, min_pages=1, dense_layers=(0,), select_per=select_per, last_page=True)
    with attached(tiny("llama"), method, budget=20) as kv:
        engine = Engine(kv)
        caches: list[KVCache] = []
        make = engine.cache
        engine.cache = lambda *given: caches.append(make(*given)) or caches[-1]  # type: ignore[method-assign, func-returns-value]
        counted: list[list[float]] = []  # per step, of the layers that choose
        note = RunningSequence.note_reads
        monkeypatch.setattr(
            RunningSequence, "note_reads", lambda slot, n: counted.append(unions(caches[0])) or note(slot, n)
        )
        generation = engine.generate(prompt(100, batch=batch), max_new_tokens=UNION_EVERY + 3)
    counts = [fmean(per_layer) for per_layer in zip(*counted[::UNION_EVERY], strict=True)]
    assert generation.measured["attended_prompt"] == pytest.approx((100 + 20 + 20) / 3)
    assert generation.measured["union_prompt"] == pytest.approx((100 + sum(counts)) / 3)
    assert (generation.measured["union_prompt"] > generation.measured["attended_prompt"]) == (
        select_per == "query_head"
    )


@pytest.mark.tokens
def test_each_sequence_of_a_batch_stops_for_itself() -> None:
    ids = prompt(30, batch=3)
    with attached(tiny("llama"), Full()) as kv:
        engine = Engine(kv)
        free = engine.generate(ids, max_new_tokens=8).tokens

        def at(count: int):  # type: ignore[no-untyped-def]
            return lambda tokens: "eos" if len(tokens) == count else None

        generation = engine.generate(ids, max_new_tokens=8, stops=[at(2), at(99), at(5)])
    assert generation.tokens == [free[0][:2], free[1], free[2][:5]]
    assert generation.stops == ["eos", "length", "eos"]
    assert len(generation.token_s) == 8


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.6, 0, 0.95), (1.5, 5, 1.0), (2.0, 8, 0.7)])
def test_tokens_are_drawn_with_the_chances_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    ids, logits = torch.zeros(1, 1, dtype=torch.long), torch.randn(1, 12, generator=torch.Generator().manual_seed(4))
    warped = TemperatureLogitsWarper(temperature)(ids, 2 * logits)  # type: ignore[arg-type]
    warped = TopKLogitsWarper(top_k or 12)(ids, warped)  # type: ignore[arg-type]
    wanted = TopPLogitsWarper(top_p)(ids, warped).softmax(-1)[0]  # type: ignore[arg-type]
    sampler = Sampled(temperature, top_k, top_p, torch.Generator().manual_seed(1))
    drawn = sampler.pick((2 * logits).expand(20_000, -1)).bincount(minlength=12) / 20_000
    assert not drawn[wanted == 0].any()
    torch.testing.assert_close(drawn, wanted, atol=0.012, rtol=0)


PREFILL, SEAL, STEP, CAPTURE = 100.0, 20.0, 3.0, 7.0  # seconds of the device, for all layers together


class Device:
    """Work queues up; a wait lasts until it is done. The host itself takes no time."""

    def __init__(self) -> None:
        self.now = self.busy_until = 0.0

    def launch(self, seconds: float) -> None:
        self.busy_until = max(self.now, self.busy_until) + seconds

    def wait(self, *_: Any) -> None:
        self.now = max(self.now, self.busy_until)

    def clock(self) -> float:
        return self.now


class LaunchingLayer(Layer, capturable=True):
    device: Device

    def prefill(self, x: AttnInput) -> Tensor:
        self.device.launch(PREFILL / 3)
        return super().prefill(x)

    def seal(self) -> None:
        self.device.launch(SEAL / 3)
        super().seal()

    def decode(self, x: AttnInput) -> Tensor:
        if not self.cache.counters.capturing:
            self.device.launch(STEP / 3)
        return super().decode(x)


@dataclass(frozen=True, kw_only=True)
class Launching(Full):
    def start(self, specs: Any, cache: Any) -> Any:
        return [LaunchingLayer(spec, cache, self) for spec in specs]


class Waiting(Greedy):
    """Tokens are needed on the host."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def pick(self, logits: Tensor) -> Tensor:
        self.device.wait()
        return super().pick(logits)


class Slow(Tape):
    """Capturing takes the host a while; replays launch what was captured."""

    device: Device

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        replay, result = super().capture(step)
        self.device.now += CAPTURE
        return lambda: (self.device.launch(STEP), replay()), result


@contextmanager
def clocked(monkeypatch: pytest.MonkeyPatch, captured: bool = False) -> Iterator[tuple[Engine, Device]]:
    """An engine that runs on the clock of a device of its own."""
    device, graphs = Device(), Slow()
    graphs.device = device
    monkeypatch.setattr(LaunchingLayer, "device", device, raising=False)
    for module in (engine_module, graph_module, running_module, slot_module):
        monkeypatch.setattr(module, "perf_counter", device.clock)
        monkeypatch.setattr(module, "wait_for", device.wait, raising=False)
    with attached(tiny("llama"), Launching()) as kv:
        yield Engine(kv, graphs=graphs if captured else None), device


@pytest.mark.parametrize(("captured", "capture"), [(False, 0.0), (True, CAPTURE)])
def test_seal_and_capture_are_clocked_until_the_device_is_done(
    captured: bool, capture: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with clocked(monkeypatch, captured) as (engine, device):
        generation = engine.generate(prompt(30), max_new_tokens=4, sampler=Waiting(device))
    assert generation.seal_s == pytest.approx(SEAL)
    assert (generation.capture_s or 0.0) == pytest.approx(capture)
    second = PREFILL + SEAL + STEP + capture
    assert generation.token_s == pytest.approx([PREFILL, second, second + STEP, second + 2 * STEP])


def two(engine: Engine, device: Device, between: float = 0.0) -> tuple[Generation, Generation]:
    """Answers to a prompt and to one that joins it after a step and some seconds."""
    batch = RunningBatch(engine)
    first = engine.join(batch, prompt(30), max_new_tokens=4, sampler=Waiting(device))
    batch.step()
    second = engine.join(batch, prompt(40), max_new_tokens=3, sampler=Waiting(device))
    device.now += between
    while batch.sequences:
        batch.step()
    return first.out, second.out


def test_a_clock_stands_still_while_another_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of two takes the device as long as two; each is billed for its own prefill and its part of the steps."""
    with clocked(monkeypatch) as (engine, device):
        first, second = two(engine, device, between=1000.0)  # a record is written
    begun = PREFILL + SEAL
    assert first.token_s == pytest.approx([PREFILL, begun + STEP, begun + 3 * STEP, begun + 5 * STEP])
    assert second.token_s == pytest.approx([PREFILL, begun + 2 * STEP, begun + 4 * STEP])
    assert (first.share_s, second.share_s) == (pytest.approx(begun + 3 * STEP), pytest.approx(begun + 2 * STEP))
    assert (first.decode_share_s, second.decode_share_s) == (pytest.approx(2 * STEP), pytest.approx(STEP))


def test_a_capture_for_others_is_in_no_token_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with clocked(monkeypatch, captured=True) as (engine, device), use_backend("torch"):
        first, second = two(engine, device)
    assert engine.plain_steps is None
    assert [one.capture_s for one in (first, second)] == pytest.approx([CAPTURE, CAPTURE])
    begun = PREFILL + SEAL + CAPTURE
    assert first.token_s[:3] == pytest.approx([PREFILL, begun + STEP, begun + 3 * STEP])
    assert second.token_s[:2] == pytest.approx([PREFILL, begun + 2 * STEP])
    assert first.share_s + second.share_s == pytest.approx(device.now)
