"""A decode step of a device-placed method never waits for a value on the host: on a GPU each wait drains the queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from harness.engine.attach import attached
from harness.engine.engine import Engine
from harness.engine.sampling import Greedy
from kernels.dispatch import use_backend
from methods.base import Method
from methods.tiers.integers import IntCodec
from tests.methods.test_contract import NAMES, attach, small, turn
from tests.tiny import prompt, tiny

WAITS = {
    "shadowkv": "how many chunks the last step did not have is the shape of what it loads",
}
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


MUST_WAIT = [name for name in NAMES if name.split("_")[0] in WAITS]  # with their presets


class WaitError(AssertionError):
    pass


class _Shapes(TorchDispatchMode):
    """Refuses operations whose result has a shape that depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if masked or name in ("nonzero", "masked_select", "_local_scalar_dense", "_unique2"):
            raise WaitError(f"{name} needs values on the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(name: str) -> Any:
        def read(*_: Any, **__: Any) -> Any:
            raise WaitError(f"Tensor.{name} reads a value")

        return read

    with monkeypatch.context() as patch, _Shapes(), use_backend("torch"):
        for name in READS:
            patch.setattr(Tensor, name, refuse(name))
        yield


@torch.inference_mode()
def steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("methods.infinigen.queues", lambda device: True)  # as on a GPU
    with attach(small(name), 0.5) as kv:
        turn(kv, kv.cache(capacity=82), prompt(80), steps=2)  # what the first one's policies return is checked
        cache = kv.cache(capacity=110)
        turn(kv, cache, prompt(80), steps=2)
        token = prompt(1, seed=3)
        with nothing_read(monkeypatch):
            for _ in range(3):
                kv.model(token, past_key_values=cache, use_cache=True)
                assert len([layer.reading for layer in cache.layers]) == 3


@pytest.mark.parametrize("name", sorted({*NAMES} - {*MUST_WAIT}))
def test_a_step_reads_no_value_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(name, monkeypatch)


@torch.inference_mode()
def test_neither_does_a_choice_among_codes_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What several sequences chose is the same as where each one's count is known."""
    logits, codec = list[Tensor](), IntCodec(bits=8, group=16)
    how: dict[str, Any] = {"budget": 0.5, "calibration": prompt(64, seed=9), "codec": codec}
    for queued in (True, False):
        monkeypatch.setattr("methods.infinigen.queues", lambda device, queued=queued: queued)
        with attached(tiny("llama"), small("infinigen"), **how) as kv:
            turn(kv, kv.cache(capacity=82), prompt(80), steps=2)  # what the policies return is checked
            cache = kv.cache(capacity=110, batch=2)
            turn(kv, cache, prompt(80, batch=2), steps=2)
            with nothing_read(monkeypatch) if queued else use_backend("torch"):
                logits.append(kv.model(prompt(1, batch=2), past_key_values=cache, use_cache=True).logits)
    assert_close(*logits)


class Noting(Greedy):
    """How many values were read from one token to the next."""

    def __init__(self) -> None:
        self.reads, self.seen = 0, list[int]()

    def pick(self, logits: Tensor) -> Tensor:
        self.seen.append(self.reads)
        self.reads = 0
        return super().pick(logits)


READY = [pytest.param(small(name), 80, id=name) for name in sorted({*NAMES} - {*MUST_WAIT})]
RAGGED = pytest.param(replace(small("quest"), last_page=False), 79, id="quest, a short last page")  # type: ignore[call-arg]


@pytest.mark.parametrize(("method", "length"), [*READY, RAGGED])
def test_the_engine_reads_a_steps_token_and_nothing_else(
    method: Method, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("methods.infinigen.queues", lambda device: True)
    sampler = Noting()

    def counted(plain: Any) -> Any:
        def read(*args: Any, **how: Any) -> Any:
            sampler.reads += 1
            return plain(*args, **how)

        return read

    with attach(method, 0.5) as kv, use_backend("torch"), monkeypatch.context() as patch:
        Engine(kv).generate(prompt(length), max_new_tokens=2)  # what its policies return is checked
        for reading in READS:
            patch.setattr(Tensor, reading, counted(getattr(Tensor, reading)))
        made = Engine(kv).generate(prompt(length), max_new_tokens=6, sampler=sampler)
    assert made.measured["attended_prompt"]
    assert sampler.seen[2:] == [1] * 4  # the seal lies in the second token's time


@pytest.mark.parametrize("name", MUST_WAIT)
def test_those_that_must_wait_are_told_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WaitError):
        steps(name, monkeypatch)
