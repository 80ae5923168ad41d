"""Choice of a backend: the best that does not refuse, or the one that was asked for; and what Triton builds with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kernels import toolchain
from kernels.dispatch import BackendError, Op, use_backend, watched


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Op:
    """`picky` takes even numbers only, `absent` cannot be imported."""
    picky, plain = ModuleType("picky_backend"), ModuleType("plain_backend")
    picky.double = lambda x: ("picky", x)  # type: ignore[attr-defined]
    picky.double_refuses = lambda x: "odd number" if x % 2 else None  # type: ignore[attr-defined]
    plain.double = lambda x: ("plain", x)  # type: ignore[attr-defined]
    for module in (picky, plain):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return Op("double", absent="no_such_module", picky=picky.__name__, torch=plain.__name__)


def test_takes_the_first_backend_that_does_not_refuse(op: Op) -> None:
    assert op(2) == ("picky", 2)
    assert op(3) == ("plain", 3)
    assert op.used == {"picky", "torch"}


def test_forced_backend_runs_or_says_why_not(op: Op) -> None:
    with use_backend("torch"):
        assert op(2) == ("plain", 2)
    with use_backend("picky"), pytest.raises(BackendError, match="picky: odd number"):
        op(3)
    with use_backend("absent"), pytest.raises(BackendError, match="absent"):
        op(2)
    assert op(2) == ("picky", 2)


def test_a_kernel_that_does_not_fit_on_the_card_leaves_the_call_to_the_next_backend(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton knows how much shared memory a kernel takes once it is compiled."""

    class OutOfResources(Exception): ...

    def double(x: int) -> None:
        if x > 100:
            raise OutOfResources("shared memory, Required: 114688, Hardware limit: 101376")

    package, module = ModuleType("card"), ModuleType("card.kernels")
    package.TOO_LARGE, module.double = (OutOfResources,), double  # type: ignore[attr-defined]
    module.__package__ = "card"
    for part in (package, module):
        monkeypatch.setitem(sys.modules, part.__name__, part)
    op = Op("double", card="card.kernels", torch="plain_backend")
    assert op(2) is None
    assert op(200) == ("plain", 200)
    assert op.used == {"card", "torch"}
    with use_backend("card"), pytest.raises(BackendError, match="114688"):
        op(200)


def test_watched_operations_run_through_the_watcher(op: Op) -> None:
    seen = []

    def around(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        seen.append((name, arguments))
        return call()

    with watched(around):
        assert op(2) == ("picky", 2)
    op(4)
    assert seen == [("double", (2,))]


ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def asked_anew() -> None:
    toolchain.unfit.cache_clear()


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in (toolchain.unfit() or "")


def test_the_seconds_of_compiling_are_clocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hooks that Triton calls before it compiles a kernel and after it has loaded it."""
    knobs = pytest.importorskip("triton").knobs
    now = iter(range(10, 100, 10))
    monkeypatch.setattr(toolchain, "perf_counter", lambda: next(now))
    monkeypatch.setattr(toolchain, "_compiled", None)
    assert toolchain.compiled_s(0) is None
    runtime = knobs.runtime.copy()
    monkeypatch.setattr(runtime, "kernel_load_end_hook", type(knobs.runtime.kernel_load_end_hook)())
    asked: list[dict[str, int]] = []
    monkeypatch.setattr(runtime, "jit_cache_hook", lambda **kernel: asked.append(kernel))
    toolchain.clock_compiling(runtime)
    for kernel in range(2):
        runtime.jit_cache_hook(key=kernel)
        runtime.kernel_load_end_hook(None, None, "name", None, "hash")
    runtime.kernel_load_end_hook(None, None, "name", None, "hash")  # on another device: nothing was compiled
    assert asked == [{"key": 0}, {"key": 1}]
    assert toolchain.compiled_s(0) == 20
    assert toolchain.compiled_s(25) == 10


def test_what_lies_on_a_gpu_compiles_nothing_for_the_cpu(op: Op) -> None:
    own, place = Op("double", cpu="picky_backend", torch="plain_backend"), SimpleNamespace(is_cuda=True)
    assert own(place) == ("plain", place)
    assert "cpu" not in own._loaded
    assert own(2) == ("picky", 2)
