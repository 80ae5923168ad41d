"""Decode steps that are captured once and replayed give what steps give that are run one by one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from harness import Engine, RunningBatch, attached
from harness.checks.trial import fresh_memory_full_of_nan
from harness.engine.attach import Attachment
from harness.engine.batch.running_sequence import UNCLOCKED, After, Generation, RunningSequence
from harness.engine.graph import CaptureBroke, CapturedStep, CudaGraphs, StepCapture
from harness.engine.trace import Tracer
from harness.prompts.teacher import Forced
from kernels.dispatch import use_backend
from methods.abilities import ability
from methods.abilities.bounded_answer import CountedAnswer
from methods.base import Attended, Budget, Method
from methods.base.state import CaptureError, StepCounters
from methods.layers import Layer
from methods.oracle import Oracle, OracleRead
from tests import fake_cuda
from tests.methods.test_contract import NAMES, QUICK, attach, small
from tests.quick import mostly_slow
from tests.tape import Tape
from tests.tiny import BY_BLOCKS, prompt, tiny

CAPTURED = [  # rows of the others go every few steps
    name for name in NAMES if (counted := ability(small(name), CountedAnswer)) is None or not counted.extra_rows
]
captured = pytest.mark.parametrize("name", mostly_slow(CAPTURED, *QUICK))


def generate(kv: Attachment, ids: Tensor, captured: bool, **how: Any) -> tuple[Generation, Engine]:
    engine = Engine(kv, graphs=Tape() if captured else None)
    if engine.forward is not None:
        engine.forward.stores = captured  # as on a GPU
    with use_backend("torch"):
        return engine.generate(ids, max_new_tokens=9, **how), engine


class Turn(NamedTuple):
    """What is known behind an answer."""

    tokens: list[list[int]]
    captured: bool
    attended: list[Attended]
    read: list[list[int] | None]


def two_turns(kv: Attachment, graphs: StepCapture | None, new: int) -> tuple[list[Turn], Engine]:
    engine, turns = Engine(kv, graphs=graphs), []
    cache = engine.cache(prompt(90), 2 * new)
    for ids in (prompt(60), prompt(30, seed=5)):
        cache.open_turn()
        with use_backend("torch"):
            made = engine.complete(cache, engine.prefill(cache, ids), ids[:, :0], began=0.0, max_new_tokens=new)
        rows = [layer.read_positions() for layer in cache.layers]
        read = [None if x is None else x.sort(-1).values.tolist() for x in rows]
        turns.append(Turn(made.tokens, made.capture_s is not None, [layer.attended for layer in cache.layers], read))
    return turns, engine


def from_host(name: str, graphs: StepCapture | None, prompts: int, **how: Any) -> tuple[list[Generation], Engine]:
    """Answers to prompts whose chosen rows lie on the host."""
    options = {"budget": 0.5, "placement": "host", "calibration": prompt(64, seed=9)} | how
    with attached(tiny("llama"), offloading(name), **options) as kv, use_backend("torch"):
        engine = Engine(kv, graphs=graphs)
        return [engine.generate(prompt(80, seed=seed), max_new_tokens=9) for seed in range(prompts)], engine


def test_a_record_says_why_waiting_for_rows_is_not_clocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU reads host memory by itself, and files come in a thread."""
    monkeypatch.setattr(RunningSequence, "crosses_bus", True)
    (made,), engine = from_host("full_offloaded", None, 1, overlap=True, placement="disk")
    assert (made.unclocked, engine.unclocked) == (None, None)
    assert made.measured["exposed_s_per_step"] is not None
    for graphs in (None, Tape()):
        (made,), engine = from_host("full_offloaded", graphs, 1, overlap=True)
        assert "exposed_s_per_step" not in made.measured
        assert made.unclocked == engine.unclocked == UNCLOCKED


def offloading(name: str) -> Method:
    return replace(small(name), group=16, residual=32) if name.startswith("kivi") else small(name)  # type: ignore[call-arg]


@pytest.mark.tokens
@pytest.mark.parametrize("new", mostly_slow([1, 2, 6], 2))
@captured
def test_a_further_turn_is_captured_anew(name: str, new: int) -> None:
    """A step that was captured and never replayed (an answer of two tokens) has not run."""
    with attach(small(name), 0.6) as kv:
        wanted, _ = two_turns(kv, None, new)
        got, engine = two_turns(kv, Tape(), new)
    assert engine.plain_steps is None
    assert [turn.captured for turn in got] == [new > 1] * 2
    assert [turn._replace(captured=False) for turn in got] == wanted


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted"), KeyboardInterrupt()])
def test_a_capture_that_fails_leaves_the_cache_as_it_was(error: BaseException) -> None:
    class Fails(Tape):
        def capture(self, step: Callable[[], Tensor]) -> Any:
            step()
            raise error

    with attach(small("snapkv"), 0.6) as kv:
        engine = Engine(kv, graphs=Fails())
        cache = engine.cache(prompt(60), 9)
        logits = engine.prefill(cache, prompt(60))
        with pytest.raises((CaptureBroke, KeyboardInterrupt)):
            engine.complete(cache, logits, prompt(60)[:, :0], began=0.0, max_new_tokens=6)
    assert cache.num_tokens == 61
    assert cache.layers[0].attended.generated == 1


@pytest.mark.tokens
@pytest.mark.parametrize("architecture", [*BY_BLOCKS, "glm"])
def test_every_architecture_can_be_captured(architecture: str) -> None:
    ids = prompt(70)
    with attach(small("sparq"), 0.5, architecture) as kv:
        wanted, _ = generate(kv, ids, False)
        got, engine = generate(kv, ids, True)
    assert engine.plain_steps is None
    assert got.tokens == wanted.tokens


@torch.inference_mode()
def test_logits_are_those_of_plain_steps_where_memory_holds_anything() -> None:
    """Room for later tokens is read by no step."""
    ids, fed = prompt(70), prompt(6, seed=2).split(1, 1)
    for name in CAPTURED:
        steps: list[list[Tensor]] = []
        for graphs in (None, Tape()):
            with attach(small(name), 0.5) as kv, use_backend("torch"), fresh_memory_full_of_nan():
                engine = Engine(kv)
                cache = engine.cache(ids, 12)
                engine.prefill(cache, ids)
                cache.seal()
                cache.prepare()
                step = CapturedStep(engine.forward, cache, graphs, engine.kept) if graphs else None
                steps.append([(step(x) if step else engine.forward(x, cache)).clone() for x in fed])
        for one, wanted in zip(*steps, strict=True):
            torch.testing.assert_close(one, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "how", "changes", "reason"),
    [
        ("pqcache", {"placement": "disk"}, {}, "placement=disk reads the chosen rows from files"),
        ("pqcache", {"reuse_steps": 1}, {}, "reuse_steps=1 lets one step choose and others not"),
        ("snapkv", {"budget": Budget(0.5, generated=2)}, {}, "lets tokens go every 1 steps"),
        ("kivi", {}, {"group": 4, "residual": 4}, "are quantised every 4 steps"),
        ("full", {"fidelity": 1}, {}, "fidelity compares"),
        ("full", {"trace": True}, {}, "trace=on clocks"),
    ],
)
def test_what_cannot_be_captured_runs_step_by_step_and_says_why(
    name: str, how: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    method, ids = replace(small(name), **changes), prompt(79)
    options = {key: how[key] for key in ("placement", "reuse_steps", "budget") if key in how}
    with attached(tiny("llama"), method, **{"budget": 0.5} | options) as kv:
        engine = Engine(kv, graphs=Tape(), fidelity=how.get("fidelity", 0))
        if "trace" in how:
            engine.tracer = Tracer(torch.device("cpu"))
        got = engine.generate(ids, max_new_tokens=5)
    assert got.capture_s is None
    assert reason in (engine.plain_steps or "")


class EveryOther(OracleRead):
    """A newcomer's: keeps the order of the steps in Python, where no replay changes it."""

    odd = False

    def select(self, q: Tensor, top: int) -> Tensor:
        self.odd = not self.odd
        return torch.arange(int(self.odd), int(self.odd) + top).expand(q.shape[0], self.spec.num_kv_heads, -1)


class Declared(EveryOther, capturable=True): ...


@pytest.mark.tokens
def test_a_newcomers_layer_is_captured_only_if_its_own_class_says_so() -> None:
    """What a ready-made layer can do says nothing of a subclass."""

    @dataclass(frozen=True, kw_only=True)
    class Newcomer(Oracle):
        read: type[OracleRead] = EveryOther

        def start(self, specs: Any, cache: Any) -> Any:
            return [Layer(spec, cache, self, self.read()) for spec in specs]

    ids = prompt(80)
    with attach(Newcomer(sinks=4), 0.3) as kv:
        wanted, _ = generate(kv, ids, False)
        got, engine = generate(kv, ids, True)
    assert got.tokens == wanted.tokens
    assert got.capture_s is None
    assert "EveryOther" in engine.plain_steps
    with attach(Newcomer(sinks=4, read=Declared), 0.3) as kv:
        claimed, engine = generate(kv, ids, True)
    assert engine.plain_steps is None
    assert claimed.capture_s is not None


def test_a_counter_is_the_same_tensor_one_higher_in_the_next_step() -> None:
    counters, device = StepCounters(), torch.device("cpu")
    counters.start()
    position, positions = counters.tensor(7, device), counters.positions(7, 3, device)
    assert positions.tolist() == [7, 8, 9]
    counters.advance()
    assert counters.tensor(8, device) is position
    assert position.tolist() == [8]
    counters.capturing = True
    with pytest.raises(CaptureError, match="count of 3"):
        counters.tensor(3, device)
    counters.stop()
    assert counters.tensor(3, device).tolist() == [3]


@pytest.mark.tokens
def test_every_example_is_captured_and_not_the_first_alone() -> None:
    """A pool whose last graph has gone cannot be opened again while a workspace lies in it: an anchor keeps it open."""
    with attach(small("snapkv"), 0.5) as kv, fake_cuda.installed():
        engine = Engine(kv, graphs=CudaGraphs(torch.device("cpu")))
        for seed in range(3):
            ids = prompt(80, seed=seed)
            wanted, _ = generate(kv, ids, False)
            with use_backend("torch"):
                got = engine.generate(ids, max_new_tokens=9)
            assert engine.plain_steps is None
            assert got.capture_s is not None
            assert got.tokens == wanted.tokens
            assert gc.isenabled()


class StopsFrom(NamedTuple):
    """Stops with the first token after the least number."""

    min_new_tokens: int

    def __call__(self, tokens: list[int]) -> str | None:
        return "stopped" if len(tokens) > self.min_new_tokens else None


@pytest.mark.tokens
@pytest.mark.parametrize(
    ("stop", "tokens", "ahead"),
    [
        (None, 8, 6),  # all steps but the first
        (StopsFrom(4), 5, 3),
        (After(7), 7, 5),
        (lambda tokens: "stopped" if len(tokens) == 5 else None, 5, 0),
    ],
)
def test_a_step_begins_before_the_host_reads_a_token_where_it_is_needed_whatever_the_token(
    stop: Any, tokens: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is taken too many, and what is recorded is what steps give that are taken one by one."""
    done: list[str] = []
    replaying = CapturedStep.__call__
    monkeypatch.setattr(CapturedStep, "__call__", lambda *both: (done.append("step"), replaying(*both))[1])
    noting = RunningSequence.note
    monkeypatch.setattr(RunningSequence, "note", lambda *all_: (done.append("token"), noting(*all_))[1])
    given = prompt(7, seed=4) if isinstance(stop, After) else None
    how: dict[str, Any] = {"max_new_tokens": 8, "stops": [stop] if stop else None}
    with attach(small("h2o"), 0.5) as kv:
        made = []
        for run in (RunningBatch.step, RunningBatch.run):
            engine = Engine(kv, graphs=Tape())
            batch = RunningBatch(engine)
            slot = engine.join(batch, prompt(80), sampler=None if given is None else Forced(given), **how)
            done.clear()
            with use_backend("torch"):
                while batch.sequences:
                    run(batch)
            made.append((slot.out.tokens, slot.out.stops, slot.out.measured, slot.out.kv, done.count("step")))
    assert made[0] == made[1]
    assert (len(made[1][0][0]), made[1][4]) == (tokens, tokens - 1)
    read_late = [done[:at].count("step") - done[:at].count("token") for at, what in enumerate(done) if what == "token"]
    assert read_late.count(2) == ahead
