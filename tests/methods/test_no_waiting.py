"""A decode step never waits for a value on the host, nor where rows lie in host memory: on a GPU each wait drains the
queue. What cannot keep to that stands in one list."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness import Engine, attached
from harness.checks.trial import turn
from kernels.dispatch import use_backend
from methods.base import Method
from methods.base.pieces import TOKENS_AT_ONCE
from methods.tiers.codec import FloatCodec
from tests.methods.test_contract import in_each_place, small
from tests.tape import Tape
from tests.tiny import prompt, tiny

CUDA = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA device on this machine")]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
# parameters that made steps wait once, and where rows then lie
VARIANTS: list[tuple[str, dict[str, Any], str]] = [
    ("quest", {"last_page": False}, "device"),
    ("quest", {"last_page": False, "select_per": "kv_head"}, "host"),
    ("infinigen", {"pool_capacity": 80, "pool_policy": "counter"}, "device"),
    ("infinigen", {"pool_capacity": 0.9, "pool_policy": "lru"}, "host"),
    ("pqcache", {"cache_tokens": 16, "cache_block": 4}, "host"),
    ("sparq", {"channel_copy": False}, "host"),
]
variants = pytest.mark.parametrize(("name", "changes", "placement"), VARIANTS)
# how often a seal may read values, per layer: what heads keep, the widest basis, that all is finite, what a press does,
# and whether the clusters of torch's k-means still move, which Triton's does not ask
SEAL_READS = {"infinigen": 1, "infinigen_alpha99": 1, "kivi": 1, "kvpress": 4, "pqcache": 10}
SEAL_READS |= {"ada_pyramid": 1, "adakv": 1, "kvzip": 2}  # the latter also once for all layers, to rank their keys
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


class WaitError(AssertionError):
    pass


def _needs_values(func: Any, args: Any) -> bool:
    name = func.overloadpacket.__name__
    masked = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
    return masked or name in ("nonzero", "masked_select", "_local_scalar_dense", "_unique2", "bincount")


class _Shapes(TorchDispatchMode):
    """Refuses operations whose result has a shape that depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _needs_values(func, args):
            raise WaitError(f"{func.overloadpacket.__name__} needs values on the host")
        return func(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):
    """Counts what waits for a value of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += _needs_values(func, args)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counted(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        def read(tensor: Tensor, *how: Any, plain: Any) -> Any:
            self.count += 1
            return plain(tensor, *how)

        with monkeypatch.context() as patch, self, use_backend("torch"):
            for name in READS:
                patch.setattr(Tensor, name, partialmethod(read, plain=getattr(Tensor, name)))
            yield


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


def as_on_a_gpu(patch: pytest.MonkeyPatch, queued: bool = True) -> None:
    for module in ("base.state", "infinigen", "parts.block_cache", "shadowkv"):
        patch.setattr(f"methods.{module}.queues", lambda device: queued)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def steps(method: Method, placement: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = deepcopy(tiny("llama")).to(device) if device != "cpu" else tiny("llama")  # type: ignore[arg-type]
    forbidding = waiting_is_an_error() if device == "cuda" else nothing_read(monkeypatch)
    if device == "cpu":
        as_on_a_gpu(monkeypatch)
    how: dict[str, Any] = {"placement": placement, "calibration": prompt(64, seed=9), "overlap": placement == "host"}
    with attached(model, method, budget=0.5, **how) as kv:
        ids, token = prompt(80).to(device), prompt(1, seed=3).to(device)
        turn(kv, kv.cache(capacity=82), ids, steps=2)  # what the first one's policies return is checked
        cache = kv.cache(capacity=110)
        turn(kv, cache, ids, steps=2)
        forward = Engine(kv).forward
        assert forward is not None
        with forbidding:
            for _ in range(3):
                forward(token, cache)
                assert len([layer.readings(1) for layer in cache.layers]) == 3


@devices
@in_each_place
def test_a_step_reads_no_value_on_the_host(
    name: str, placement: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(small(name), placement, device, monkeypatch)


@devices
@variants
def test_neither_does_a_step_of_other_parameters(
    name: str, changes: dict[str, Any], placement: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(replace(small(name), **changes), placement, device, monkeypatch)


@in_each_place
def test_a_seal_waits_as_often_as_its_method_must(name: str, placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decomposition of ShadowKV's keys waits within torch, which is not seen here."""
    with attached(tiny("llama"), small(name), budget=0.5, placement=placement, calibration=prompt(64, seed=9)) as kv:
        cache = kv.cache(capacity=82)
        turn(kv, cache, prompt(80), steps=1)
        cache = kv.cache(capacity=82)
        with torch.inference_mode():
            Engine(kv).prefill(cache, prompt(80))
            reads = Reads()
            with reads.counted(monkeypatch):
                cache.seal()
    assert reads.count <= SEAL_READS.get(name, 0) * len(cache.layers)


@pytest.mark.parametrize("name", ["kivi", "quest"])
def test_a_seal_in_fewer_bits_waits_once_for_a_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pieces it is written in: whether all numbers could be is asked at the end."""
    codec = FloatCodec() if name == "quest" else None
    with attached(tiny("llama"), small(name), budget=0.5, codec=codec) as kv, torch.inference_mode():
        cache = kv.cache(capacity=1602)
        Engine(kv).prefill(cache, prompt(1600))
        reads = Reads()
        with reads.counted(monkeypatch):
            cache.seal()
    away = [layer.away for layer in cache.layers]  # type: ignore[attr-defined]
    assert max(away) > 2 * TOKENS_AT_ONCE
    assert reads.count == sum(count > 0 for count in away)


@pytest.mark.tokens
@variants
def test_captured_steps_of_other_parameters_are_the_same(name: str, changes: dict[str, Any], placement: str) -> None:
    """A pool fills up on the way, and some heads choose a page that is short. A captured step counts the blocks that it
    asks for, and a plain one leaves that to the next step."""
    how: dict[str, Any] = {"placement": placement, "calibration": prompt(64, seed=9)}
    with attached(tiny("llama"), replace(small(name), **changes), budget=0.5, **how) as kv, use_backend("torch"):
        made = []
        for graphs in (None, Tape()):
            engine = Engine(kv, graphs=graphs)
            made.append([engine.generate(prompt(79, seed=seed), max_new_tokens=9) for seed in range(2)])
        assert engine.plain_steps is None
    for plain, captured in zip(*made, strict=True):
        assert captured.capture_s is not None
        if "cache_tokens" in changes:
            moved, before = (one.measured.pop("moved_bytes_per_step") for one in (captured, plain))
            assert moved >= before > 0
            captured.kv["device"] = plain.kv["device"]  # which holds the numbers of those that are to come
        assert (captured.tokens, captured.measured, captured.kv) == (plain.tokens, plain.measured, plain.kv)
