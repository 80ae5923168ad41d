"""A step is captured once for a size: members join and leave by what is written to its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from harness.engine.attach import Attachment, attached
from harness.engine.batch.running import RunningBatch
from harness.engine.batch.running_sequence import Generation, RunningSequence
from harness.engine.engine import Engine
from kernels.step_inputs import StepInputs, record_input, recording_inputs
from methods.base import Method
from methods.shadowkv import ShadowKV
from tests.harness.engine.test_together import (
    TOGETHER,
    assert_together_as_alone,
    attach_compiled,
    compilable,
    engine_of,
)
from tests.methods.test_contract import QUICK, attach, small
from tests.quick import slow_if
from tests.tape import Tape
from tests.tiny import prompt

# lengths, budgets and rooms of each of these are between two powers of two
LENGTHS = (100, 119, 97, 113, 105, 118, 99, 117, 110, 103, 116, 112)
NEW = (5, 7, 6, 6, 5, 8, 7, 5, 7, 5, 6, 8)
# PyramidKV's layers have budgets on both sides of a power of two
SIZES = {"pyramidkv": 2}
EACH = (
    "sparq",
    "rocketkv",
    "lm_infinite",
)  # plain torch takes memory in their steps, which are captured for each sequence


def examples() -> list[tuple[Any, int]]:
    return [(prompt(length, seed=i), new) for i, (length, new) in enumerate(zip(LENGTHS, NEW, strict=True))]


def in_a_batch(engine: Engine, most: int, few: int | None = None) -> list[Generation]:
    """All examples, or the first `few`, `most` of them at once: one joins where another has left."""
    batch, waiting, slots = RunningBatch(engine), examples()[:few], list[RunningSequence]()
    while waiting or batch.sequences:
        while waiting and len(batch.sequences) < most:
            ids, new = waiting.pop(0)
            slots.append(engine.join(batch, ids, max_new_tokens=new))
        batch.step()
    return [slot.out for slot in slots]


def engines(kv: Attachment) -> tuple[Engine, Engine, Tape]:
    """One that takes plain steps and one that captures them; their first answers, which are checked, are given."""
    tape = Tape()
    plain, captured = Engine(kv), Engine(kv, graphs=tape)
    for engine in (plain, captured):
        engine.generate(prompt(110), max_new_tokens=2)
    tape.captured = tape.dropped = 0
    return plain, captured, tape


def seen(made: Generation) -> tuple[Any, ...]:
    return made.tokens, made.stops, made.measured, made.kv


ON_HOST = ("full_offloaded", "pqcache", "quest", "sparq", "rocketkv", "infinigen", "shadowkv")
UNEQUAL = [prompt(30), prompt(61, batch=2), prompt(90), prompt(33)]  # a budget of 40 covers two of them


def attach_on_host(name: str, budget: float | int = 40, **how: Any) -> Any:
    asked = {"budget": None if name.startswith("full") else budget, "calibration": prompt(64, seed=9)}
    return attached(compilable(name), method_of(name), placement="host", **asked, **how)


def method_of(name: str) -> Method:
    """A small method. Of several heads ShadowKV's hit cache moves as many chunks for each, alone and where it may wait:
    here it moves what it reads."""
    method = small(name)
    return replace(method, hit_cache=False) if isinstance(method, ShadowKV) else method


@pytest.mark.tokens
@pytest.mark.parametrize(
    "case",
    slow_if(
        lambda case: case[0] not in (*QUICK, "sparq", "pyramidkv", "full_offloaded"),
        [*((name, "device") for name in TOGETHER), *((name, "host") for name in ON_HOST)],
    ),
    ids="-".join,
)
def test_examples_that_come_and_go_are_captured_once_for_each_size(case: tuple[str, str]) -> None:
    """Of four slots, whether or not one of them is free, of two and of one."""
    name, placement = case
    with attach_compiled(name) if placement == "device" else attach_on_host(name, 0.5) as kv:
        plain, engine, tape = engines(kv)
        together = in_a_batch(engine, 4, few=12 if placement == "device" else 6)
        alone = [plain.generate(ids, max_new_tokens=new) for ids, new in examples()[: len(together)]]
    assert engine.plain_steps is None
    assert [seen(generation) for generation in together] == [seen(generation) for generation in alone]
    assert (together[0].measured["moved_bytes_per_step"] > 0) == (placement == "host")
    assert tape.captured <= 3 * SIZES.get(name, 1) or name in EACH
    assert not tape.dropped or name in EACH


def test_the_steps_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.engine.graph.MOST", 2)
    with attach(small("snapkv"), 0.5) as kv:
        _, engine, tape = engines(kv)
        for length, captured, dropped in ((230, 1, 0), (111, 1, 0), (450, 2, 1), (112, 2, 1), (231, 3, 2)):
            engine.generate(prompt(length), max_new_tokens=3)
            assert (tape.captured, tape.dropped) == (captured, dropped)


@pytest.mark.tokens
def test_two_batches_of_an_engine_do_not_share_a_step_that_one_is_using() -> None:
    with attach(small("snapkv"), 0.5) as kv:
        plain, engine, tape = engines(kv)
        ids, other, new = prompt(110), prompt(111, seed=1), 6
        batch = RunningBatch(engine)
        slot = engine.join(batch, ids, max_new_tokens=9)
        for _ in range(4):
            batch.step()
        between = engine.generate(other, max_new_tokens=new)
        while batch.sequences:
            batch.step()
        assert slot.out.tokens == plain.generate(ids, max_new_tokens=9).tokens
        assert between.tokens == plain.generate(other, max_new_tokens=new).tokens
    assert tape.captured == 1  # for the second: the first took the one that was there


@pytest.mark.tokens
@pytest.mark.parametrize("name", TOGETHER)
def test_a_budget_that_needs_more_room_is_another_size(name: str) -> None:
    """Of 180 and 231 tokens, whose powers of two are the same: 0.3 of them are on both sides of 64."""
    with attach_compiled(name, 0.3) as kv:
        plain, engine, _ = engines(kv)
        for length in (180, 231, 249, 140, 255):
            ids = prompt(length, seed=length)
            captured, alone = (one.generate(ids, max_new_tokens=5) for one in (engine, plain))
            assert seen(captured) == seen(alone)
    assert engine.plain_steps is None


def test_a_tensor_used_twice_cannot_stand_for_two() -> None:
    first, other = StepInputs(), StepInputs()
    number = torch.tensor([3])
    for inputs, numbers in ((first, [number, number]), (other, [torch.tensor([4]), torch.tensor([5])])):
        with recording_inputs(inputs):
            for count in numbers:
                record_input("count", count)
    assert first.kinds == other.kinds
    assert not first.take_over(other)
    assert number.item() == 3
    assert other.take_over(first)
    assert [count.item() for count in other.tensors] == [3, 3]


# how often the step that follows a seal sends small numbers to the device: where three layers' tensors lie, and counts
SENT = {"full": 17, "snapkv": 18, "pqcache": 47}


@torch.inference_mode()
@pytest.mark.parametrize("name", SENT)
def test_a_first_step_sends_its_numbers_without_waiting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that goes on with a kept step. `to_device` alone calls `torch.as_tensor`, and waits for nothing."""
    calls = {"tensor": 0, "as_tensor": 0}

    def note(called: str, plain: Callable[..., Tensor], *args: Any, **how: Any) -> Tensor:
        calls[called] += called == "as_tensor" or "device" in how
        return plain(*args, **how)

    with attach_compiled(name) as kv:
        _, engine, tape = engines(kv)
        for length in (119, 118):
            batch = RunningBatch(engine)
            engine.join(batch, prompt(length), max_new_tokens=4)
            calls.update(tensor=0, as_tensor=0)
            with monkeypatch.context() as patch:
                for called in calls:
                    patch.setattr(torch, called, partial(note, called, getattr(torch, called)))
                batch.step()
            assert (name, calls) == (name, {"tensor": 0, "as_tensor": SENT[name]})
            while batch.sequences:
                batch.step()
    assert tape.captured < 2  # the second answer, at least, takes a step that was kept


THREE = ("full", "snapkv", "pqcache")


class Remembered(Tape):
    """Knows which of its graphs are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[ref[Any]] = []

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        replay, result = super().capture(step)
        self.graphs.append(ref(replay.__self__))  # type: ignore[attr-defined]
        return replay, result

    @property
    def alive(self) -> int:
        return sum(graph() is not None for graph in self.graphs)


@pytest.mark.tokens
@torch.inference_mode()
@pytest.mark.parametrize("name", THREE)
def test_a_kept_step_reads_nothing_of_the_sequence_it_was_captured_for(name: str) -> None:
    with attach_compiled(name) as kv:
        plain, engine = Engine(kv), Engine(kv, graphs=(graphs := Remembered()))
        engine.generate(prompt(110), max_new_tokens=2)  # whose layers are checked, so that its step is not kept
        assert not graphs.alive
        for length in (119, 118, 117):  # the same size
            ids = prompt(length, seed=length)
            batch = RunningBatch(engine)
            slot = engine.join(batch, ids, max_new_tokens=8)
            layers = slot.cache.layers
            while batch.sequences:
                batch.step()
            assert slot.out.tokens == plain.generate(ids, max_new_tokens=8).tokens
            for layer in layers:
                for part in (layer.store, *layer.policies):  # type: ignore[attr-defined]
                    for x in vars(part).values():
                        if isinstance(x, Tensor):
                            x.fill_(torch.nan if x.is_floating_point() else 0)
    assert len(graphs.graphs) == 2


@pytest.mark.tokens
@pytest.mark.parametrize("name", ON_HOST)
def test_members_get_and_move_what_each_does_alone(name: str) -> None:
    with attach_on_host(name) as kv:
        assert_together_as_alone(kv, UNEQUAL, None)


@pytest.mark.tokens
def test_members_with_hit_caches_get_the_same_and_move_no_more() -> None:
    prompts, made = [prompt(length, seed=length) for length in (61, 90, 74)], []
    how: dict[str, Any] = {"budget": 0.5, "placement": "host"}
    with attached(compilable("shadowkv"), small("shadowkv"), **how) as kv:
        plain = engine_of(kv)
        alone = [plain.generate(ids, max_new_tokens=6) for ids in prompts]
        for engine in (plain, engine_of(kv, graphs=Tape())):
            batch = RunningBatch(engine)
            slots = [engine.join(batch, ids, max_new_tokens=6) for ids in prompts]
            while batch.sequences:
                batch.step()
            assert (engine.one_by_one, engine.plain_steps) == (None, None)
            made.append([slot.out for slot in slots])
    for one, *together in zip(alone, *made, strict=True):
        before = one.measured.pop("moved_bytes_per_step")
        for other in together:
            assert 0 < other.measured.pop("moved_bytes_per_step") <= before
            assert (other.tokens, other.measured) == (one.tokens, one.measured)
            assert 0 < other.measured["hit_rate"] < 1
