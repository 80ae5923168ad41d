"""What the engine's times hold where operations are launched now and done later, on a device that is only a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engine import engine as engine_module
from harness.engine import graph as graph_module
from harness.engine.attach import attached
from harness.engine.batch import running as running_module
from harness.engine.batch import running_sequence as slot_module
from harness.engine.batch.generation import Generation
from harness.engine.batch.running import RunningBatch
from harness.engine.engine import Engine
from harness.engine.sampling import Greedy
from harness.engine.wait import wait_for
from kernels.dispatch import use_backend
from methods.base import AttnInput
from methods.full import Full
from methods.layers import Layer
from tests.tape import Tape
from tests.tiny import prompt, tiny

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


def generate(monkeypatch: pytest.MonkeyPatch, captured: bool = False, context: int | None = None) -> Generation:
    with clocked(monkeypatch, captured) as (engine, device):
        return engine.generate(prompt(30), max_new_tokens=4, context_tokens=context, sampler=Waiting(device))


def test_the_seal_is_clocked_until_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    made = generate(monkeypatch)
    assert made.seal_s == pytest.approx(SEAL)
    second = PREFILL + SEAL + STEP
    assert made.token_s == pytest.approx([PREFILL, second, second + STEP, second + 2 * STEP])


def test_a_seal_behind_a_context_holds_none_of_its_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    made = generate(monkeypatch, context=25)
    assert (made.seal_s, made.question_s) == (pytest.approx(SEAL), pytest.approx(5 * STEP))
    assert made.token_s[0] == pytest.approx(PREFILL + SEAL + 5 * STEP)


def test_capturing_is_clocked_without_the_step_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = generate(monkeypatch, captured=True)
    assert made.capture_s == pytest.approx(CAPTURE)
    second = PREFILL + SEAL + STEP + CAPTURE
    assert made.token_s == pytest.approx([PREFILL, second, second + STEP, second + 2 * STEP])


def test_a_clock_stands_still_while_another_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of two takes the device as long as two; each is billed for its own prefill and its part of the steps."""
    with clocked(monkeypatch) as (engine, device):
        batch = RunningBatch(engine)
        first = engine.join(batch, prompt(30), max_new_tokens=4, sampler=Waiting(device))
        batch.step()
        second = engine.join(batch, prompt(40), max_new_tokens=3, sampler=Waiting(device))
        device.now += 1000.0  # a record is written
        while batch.sequences:
            batch.step()
    begun = PREFILL + SEAL
    assert first.out.token_s == pytest.approx([PREFILL, begun + STEP, begun + 3 * STEP, begun + 5 * STEP])
    assert second.out.token_s == pytest.approx([PREFILL, begun + 2 * STEP, begun + 4 * STEP])
    assert (first.out.share_s, second.out.share_s) == (pytest.approx(begun + 3 * STEP), pytest.approx(begun + 2 * STEP))
    assert (first.out.decode_share_s, second.out.decode_share_s) == (pytest.approx(2 * STEP), pytest.approx(STEP))


def test_a_capture_for_others_is_in_no_token_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with clocked(monkeypatch, captured=True) as (engine, device), use_backend("torch"):
        batch = RunningBatch(engine)
        first = engine.join(batch, prompt(30), max_new_tokens=4, sampler=Waiting(device))
        batch.step()
        second = engine.join(batch, prompt(40), max_new_tokens=3, sampler=Waiting(device))
        while batch.sequences:
            batch.step()
    assert engine.plain_steps is None
    assert [one.out.capture_s for one in (first, second)] == pytest.approx([CAPTURE, CAPTURE])
    begun = PREFILL + SEAL + CAPTURE
    assert first.out.token_s[:3] == pytest.approx([PREFILL, begun + STEP, begun + 3 * STEP])
    assert second.out.token_s[:2] == pytest.approx([PREFILL, begun + 2 * STEP])
    assert first.out.share_s + second.out.share_s == pytest.approx(device.now)


def test_waiting_is_for_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for name in ("cpu", "cuda:1"):
        wait_for(torch.device(name))
    assert waited == [torch.device("cuda:1")]
