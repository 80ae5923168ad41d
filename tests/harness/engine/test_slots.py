"""Sequences of any lengths that step together, join and leave: each gets what it gets alone."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from harness import Engine, RunningBatch, attached
from harness.engine.attach import Attachment
from harness.engine.attach_options import AttachOptions
from harness.engine.batch.running_sequence import Generation, Stop
from harness.engine.sampling import Sampled, Sampler
from harness.prompts.teacher import Forced
from kernels.dispatch import use_backend
from methods.base import Budget
from methods.full import Full
from methods.oracle import Oracle
from tests.methods.test_contract import NAMES, attach, small
from tests.quick import mostly_slow
from tests.tape import Tape
from tests.tiny import prompt, tiny

NEW = 8
LENGTHS = (61, 90, 74)  # the second leaves after three tokens, and a fourth joins
LATER = 67
MEASURED = (
    "tokens", "stops", "sealed", "fallback", "measured", "kv", "along",
)  # fmt: skip

ORACLE = Oracle(sinks=2)


def third(tokens: list[int]) -> str | None:
    return "eos" if len(tokens) == 3 else None


def asked() -> list[tuple[Tensor, dict[str, Any]]]:
    """Prompts, and how they are answered."""
    stops: dict[int, Stop] = {1: third}
    return [
        (prompt(length, seed=i), {"max_new_tokens": NEW, "stops": [stops[i]] if i in stops else None})
        for i, length in enumerate((*LENGTHS, LATER))
    ]


def alone(engine: Engine, **how: Any) -> list[Generation]:
    return [engine.generate(ids, **given, **how) for ids, given in asked()]


def together(engine: Engine, **how: Any) -> list[Generation]:
    """The last one joins when the first has left."""
    *first, (ids, given) = asked()
    batch = RunningBatch(engine)
    slots = [engine.join(batch, ids, **given, **how) for ids, given in first]
    while not batch.step():
        pass
    assert len(batch.sequences) == 2
    slots.append(engine.join(batch, ids, **given, **how))
    while batch.sequences:
        batch.step()
    return [slot.out for slot in slots]


def assert_the_same(made: Sequence[Generation], wanted: Sequence[Generation]) -> None:
    assert [len(generation.tokens[0]) for generation in made] == [8, 3, 8, 8]
    for generation, other in zip(made, wanted, strict=True):
        assert {name: getattr(generation, name) for name in MEASURED} == {
            name: getattr(other, name) for name in MEASURED
        }


QUICK = ("full", "h2o", "infllm", "pqcache", "quest", "shadowkv")
each = pytest.mark.parametrize("name", mostly_slow(NAMES, *QUICK))


def engine_of(kv: Attachment, **how: Any) -> Engine:
    return Engine(kv, prefill_chunk=None if not kv.method.dense_prefill else 40, **how)


@pytest.mark.tokens
@pytest.mark.usefixtures("short")
@each
def test_each_gets_what_it_gets_alone(name: str) -> None:
    """By blocks and by the model's own forward."""
    with attach(small(name), 0.5) as kv:
        engine = engine_of(kv)
        wanted = alone(engine)
        assert_the_same(together(engine), wanted)
        engine.forward = None
        assert_the_same(together(engine), wanted)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of an answer that end after 2, 4 and 8 steps, in place of 64, 128 and so on."""
    monkeypatch.setattr("harness.engine.batch.along.FIRST", 2)


def mean(answer: Generation, key: str) -> float:
    """Return the mean over all steps, of the means of stretches."""
    assert answer.along is not None
    ends = [0.0, *answer.along["steps"]]
    steps = [after - before for before, after in pairwise(ends)]
    return sum(n * value for n, value in zip(steps, answer.along[key], strict=True)) / ends[-1]


@pytest.mark.tokens
@pytest.mark.usefixtures("short")
@each
def test_captured_steps_are_the_same(name: str) -> None:
    """What a method refuses alone it refuses here, for the same reason. Costs along the answer add up to its own."""
    rows: dict[str, Any] = {"prompt": prompt(80, batch=3), "max_new_tokens": NEW, "context_tokens": 74}
    with attach(small(name), 0.5, placement="host" if name == "pqcache" else "device") as kv, use_backend("torch"):
        wanted, batch = alone(engine_of(kv)), engine_of(kv).generate(**rows)
        engine, single = (engine_of(kv, graphs=Tape()) for _ in range(2))
        single.forward.stores = True  # as on a GPU
        slots, first = together(engine), single.generate(**rows)
    assert engine.plain_steps == single.plain_steps
    assert {slot.capture_s is None for slot in slots} == {first.capture_s is None}
    assert {key: getattr(first, key) for key in MEASURED} == {key: getattr(batch, key) for key in MEASURED}
    assert_the_same(slots, wanted)
    for answer in wanted:
        assert answer.along is not None
        assert answer.along["steps"] == ([2] if len(answer.tokens[0]) == 3 else [2, 4, 7])
        assert mean(answer, "attended") == pytest.approx(answer.measured["attended_total"], abs=0.01)
        assert mean(answer, "moved_bytes") == pytest.approx(answer.measured["moved_bytes_per_step"], abs=0.01)
        assert answer.along["used_bytes"][-1] <= sum(answer.kv.values())


@pytest.mark.tokens
@pytest.mark.usefixtures("short")
@each
def test_a_question_is_decoded_beside_the_others(name: str) -> None:
    with attach(small(name), 0.5) as kv:
        engine = engine_of(kv)
        slots = together(engine, context_tokens=55)
        assert_the_same(slots, alone(engine, context_tokens=55))
    assert all(slot.question_s for slot in slots)


@pytest.mark.tokens
def test_fidelity_is_each_slot_s_own() -> None:
    with attach(ORACLE, 0.3) as kv:
        engine = engine_of(kv, fidelity=2)
        slots, wanted = together(engine), alone(engine)
    for slot, other in zip(slots, wanted, strict=True):
        assert slot.tokens == other.tokens
        [mine], [theirs] = slot.fidelity or [], other.fidelity or []
        assert mine["first_difference"] == theirs["first_difference"]
        for name in ("steps", "recall", "mass", "error", "kl"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-4)


@pytest.mark.parametrize("count", [1, 2])
def test_a_cache_is_freed_once_its_slot_has_left(count: int) -> None:
    """Before the next prompt needs the memory."""
    with attached(tiny("llama"), ORACLE, budget=0.5) as kv:
        engine, batch = Engine(kv), RunningBatch(Engine(kv))
        for i in range(count):
            engine.join(batch, prompt(50 + i), max_new_tokens=3 + i)
        [cache] = [ref(slot.cache) for slot in batch.sequences if slot.max_new_tokens == 3]
        while len(batch.sequences) == count:
            batch.step()
        gc.collect()
        assert cache() is None


@pytest.mark.tokens
@pytest.mark.parametrize("kind", ["sampled", "forced"])
def test_each_slot_picks_its_own_tokens(kind: str) -> None:
    def sampler(seed: int) -> Sampler:
        return (
            Sampled(0.5 + seed, 9 * seed, 1 - 0.2 * seed, torch.Generator().manual_seed(seed))
            if kind == "sampled"
            else Forced(prompt(6, seed=seed))
        )

    with attached(tiny("llama"), ORACLE, budget=0.5) as kv:
        engine, batch = Engine(kv), RunningBatch(Engine(kv))
        slots = [engine.join(batch, prompt(50 + i), max_new_tokens=6, sampler=sampler(i)) for i in range(3)]
        while batch.sequences:
            batch.step()
        wanted = [engine.generate(prompt(50 + i), max_new_tokens=6, sampler=sampler(i)) for i in range(3)]
    assert [slot.out.tokens for slot in slots] == [alone.tokens for alone in wanted]
    assert [slot.out.nll and pytest.approx(slot.out.nll) for slot in slots] == [alone.nll for alone in wanted]


@pytest.mark.tokens
def test_a_step_that_one_slot_refuses_runs_plain_until_it_has_left() -> None:
    """Caches of several attachments may run together."""
    with attached(tiny("llama"), ORACLE, budget=0.5) as kv, use_backend("torch"):
        reusing = Attachment(kv.model, ORACLE, AttachOptions(budget=0.5, reuse_steps=1))
        wanted = Engine(kv).generate(prompt(60), max_new_tokens=6)
        engine = Engine(kv, graphs=Tape())
        batch = RunningBatch(engine)
        slot = engine.join(batch, prompt(60), max_new_tokens=6)
        other = Engine(reusing).join(batch, prompt(70), max_new_tokens=3)
        while batch.sequences:
            batch.step()
    assert "reuse_steps=1" in (engine.plain_steps or "")
    assert (other.out.capture_s is None, slot.out.capture_s is None) == (True, False)
    assert slot.out.tokens == wanted.tokens


# The costs along an answer are exact where they can be counted; test_slots.py holds the other methods'.


def test_full_reads_all_and_a_limit_of_generated_tokens_ends_growth() -> None:
    row = 3 * 2 * 2 * 16 * 4  # bytes of a token: layers, keys and values, heads, channels, fp32
    with attached(tiny("llama"), Full()) as kv:
        full = Engine(kv).generate(prompt(50), max_new_tokens=140).along
        assert Engine(kv).generate(prompt(50), max_new_tokens=64).along is None  # 63 steps
    assert full == {
        "steps": [64, 128, 139],
        "attended": [50 + 32.5, 50 + 96.5, 50 + 134],
        "moved_bytes": [0, 0, 0],
        "used_bytes": [row * (50 + steps) for steps in (64, 128, 139)],
    }
    with attached(tiny("llama"), small("streaming"), budget=Budget(0.5, generated=40)) as kv:
        kept = Engine(kv).generate(prompt(50), max_new_tokens=140).along
    assert kept is not None
    assert kept["attended"][0] < kept["attended"][1] <= 25 + 40
    assert max(kept["used_bytes"]) <= row * (25 + 40) + 64 * 25  # with the positions that are kept
