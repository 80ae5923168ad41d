"""Decode steps that are recorded once and repeated give what steps give that are run one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.attach import Attachment, attached
from harness.config import Settings, SettingsError
from harness.engine import Engine, Generation
from harness.graph import RepeatedStep
from harness.trace import Tracer
from kernels.dispatch import use_backend
from methods.base import AttnInput, Method
from methods.clock import Clock, RecordingError
from methods.full import Full
from methods.layers import DenseLayer
from tests.methods.test_contract import NAMES, attach, fresh_memory_full_of_nan, small
from tests.recorder import Tape
from tests.tiny import ARCHITECTURES, prompt, tiny

methods = pytest.mark.parametrize("name", NAMES)


def repeatable(name: str) -> Method:
    method = small(name)
    return replace(method, hit_cache=False) if name == "shadowkv" else method  # type: ignore[call-arg]


def generate(kv: Attachment, ids: Tensor, recorded: bool, **how: Any) -> tuple[Generation, Engine]:
    engine = Engine(kv, recorder=Tape() if recorded else None)
    with use_backend("torch"):
        return engine.generate(ids, max_new_tokens=9, **how), engine


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("context", [None, 74])
@methods
def test_repeated_steps_are_the_same(name: str, context: int | None, batch: int) -> None:
    ids = prompt(80, batch=batch)
    with attach(repeatable(name), 0.5) as kv:
        wanted, _ = generate(kv, ids, False, context_tokens=context)
        got, engine = generate(kv, ids, True, context_tokens=context)
    assert engine.plain_steps is None
    assert got.graph_s is not None
    assert got.tokens == wanted.tokens
    for key in ("stops", "attended_prompt", "attended_total", "moved_bytes_per_step", "kv", "sealed"):
        assert getattr(got, key) == getattr(wanted, key), key


@methods
def test_a_further_turn_is_recorded_anew(name: str) -> None:
    turns = [prompt(60), prompt(30, seed=5)]
    said: list[list[list[int]]] = []
    with attach(repeatable(name), 0.6) as kv:
        for recorder in (None, Tape()):
            engine = Engine(kv, recorder=recorder)
            cache = engine.cache(torch.cat(turns, 1), 12)
            said.append([])
            for ids in turns:
                cache.open_turn()
                with use_backend("torch"):
                    logits = engine.prefill(cache, ids)
                    made = engine.complete(cache, logits, ids[:, :0], began=0.0, max_new_tokens=6)
                said[-1] += made.tokens
                assert (made.graph_s is None) == (recorder is None)
    assert said[0] == said[1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_can_be_recorded(architecture: str) -> None:
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
    for name in NAMES:
        steps: list[list[Tensor]] = []
        for recorder in (None, Tape()):
            with attach(repeatable(name), 0.5) as kv, use_backend("torch"), fresh_memory_full_of_nan():
                engine = Engine(kv)
                assert engine.forward is not None
                cache = engine.cache(ids, 12)
                engine.prefill(cache, ids)
                cache.seal()
                step = RepeatedStep(engine.forward, cache, recorder) if recorder else None
                steps.append([(step(x) if step else engine.forward(x, cache)).clone() for x in fed])
        for one, wanted in zip(*steps, strict=True):
            torch.testing.assert_close(one, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "how", "changes", "reason"),
    [
        ("pqcache", {"placement": "host"}, {}, "placement=host gathers"),
        ("pqcache", {"stale_by": 1}, {}, "stale_by=1"),
        ("shadowkv", {}, {"hit_cache": True}, "hit_cache=true asks the host"),
        ("quest", {}, {"last_page": False}, "different numbers of tokens"),
        ("full", {"fidelity": 1}, {}, "fidelity compares"),
        ("full", {"trace": True}, {}, "trace=on clocks"),
    ],
)
def test_what_cannot_be_recorded_runs_step_by_step_and_says_why(
    name: str, how: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    method, ids = replace(small(name), **changes), prompt(79)
    options = {key: how[key] for key in ("placement", "stale_by") if key in how}
    with attached(tiny("llama"), method, budget=0.5, **options) as kv:
        engine = Engine(kv, recorder=Tape(), fidelity=how.get("fidelity", 0))
        if "trace" in how:
            engine.tracer = Tracer(torch.device("cpu"))
        got = engine.generate(ids, max_new_tokens=5)
    assert got.graph_s is None
    assert reason in (engine.plain_steps or "")


def test_a_rotation_that_depends_on_the_length_is_refused() -> None:
    model = tiny("llama")
    with attached(model, Full()) as kv:
        engine = Engine(kv, recorder=Tape())
        rotary = model.get_decoder().rotary_emb
        before, rotary.rope_type = rotary.rope_type, "dynamic"
        try:
            engine.generate(prompt(20), max_new_tokens=4)
        finally:
            rotary.rope_type = before
    assert engine.plain_steps == "dynamic rotations depend on the length of the text"


class CountsInPython(DenseLayer):
    """Says that its step can be repeated, and reads a number of tokens that Python knows."""

    def decode(self, x: AttnInput) -> Tensor:
        self.store.append(x.k, x.v)
        return self.attend(x.q, self.store.since(0)._replace(k=self.store.k, v=self.store.v, live=None))


class Waits(DenseLayer):
    def decode(self, x: AttnInput) -> Tensor:
        return super().decode(x) * float(x.q.sum() < 1e9)


@dataclass(frozen=True, kw_only=True)
class Wrong(Full):
    layer: type[DenseLayer]

    def start(self, specs: Any, request: Any) -> Any:
        return [self.layer(spec, request, self) for spec in specs]


def test_the_tape_finds_a_step_that_is_not_the_same_each_time() -> None:
    ids = prompt(40)
    with attach(Full(), None) as kv:
        wanted, _ = generate(kv, ids, False)
    with attach(Wrong(layer=CountsInPython), None) as kv:
        assert generate(kv, ids, False)[0].tokens == wanted.tokens
        assert generate(kv, ids, True)[0].tokens != wanted.tokens
    with attach(Wrong(layer=Waits), None) as kv, pytest.raises(RecordingError, match="waits"):
        generate(kv, ids, True)


def test_the_clock_gives_the_same_tensor_one_higher_in_the_next_step() -> None:
    clock, device = Clock(), torch.device("cpu")
    clock.start()
    position, places = clock.now(7, device), clock.places(7, 3, device)
    assert places.tolist() == [7, 8, 9]
    clock.tick()
    assert clock.now(8, device) is position
    assert position.tolist() == [8]
    clock.recording = True
    with pytest.raises(RecordingError, match="count of 3"):
        clock.now(3, device)
    clock.stop()
    assert clock.now(3, device).tolist() == [3]


def test_graphs_are_refused_on_a_cpu() -> None:
    with pytest.raises(SettingsError, match="graphs=on needs device=cuda, and device is cpu"):
        Settings(graphs="on")
