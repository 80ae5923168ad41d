"""Sequences of a running batch take a layer's step by one call of its policies, however many they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from harness import Engine, RunningBatch, attached
from harness.engine.attach import Attachment
from harness.engine.attach_options import AttachOptions
from harness.engine.batch.cache import CHECKED
from harness.engine.batch.running_sequence import Generation, RunningSequence
from harness.engine.cache import KVCache
from harness.engine.trace import Tracer
from kernels.step_inputs import StepInputs, record_input, recording_inputs
from methods.base import Method
from methods.full import Full
from methods.kivi import Kivi
from methods.shadowkv import ShadowKV
from methods.tiers.codecs import codec_of
from tests.batches import together as in_one_batch
from tests.methods.test_contract import QUICK, attach, small
from tests.quick import every, slow_if
from tests.tape import Tape
from tests.tiny import SHAPE, prompt, tiny

TOGETHER = (
    "full", "streaming", "snapkv", "pyramidkv", "h2o", "oracle", "pqcache", "sparq", "quest", "rocketkv", "infinigen",
    "shadowkv", "adakv", "ada_pyramid", "lm_infinite",
)  # fmt: skip


together = pytest.mark.parametrize("name", TOGETHER)


def engine_of(kv: Attachment, **how: Any) -> Engine:
    """Its first answer, which is checked, lies behind it."""
    engine = Engine(kv, **how)
    engine.generate(prompt(60), max_new_tokens=2)
    return engine


def joined(engine: Engine, *lengths: int, new: int = 9) -> tuple[RunningBatch, list[RunningSequence]]:
    batch = RunningBatch(engine)
    return batch, [engine.join(batch, prompt(length, seed=length), max_new_tokens=new) for length in lengths]


def reason(engine: Engine) -> str | None:
    """Why the members of a batch attend one after the other."""
    batch, _ = joined(engine, 61, 74)
    batch.step()
    return engine.one_by_one


@pytest.mark.parametrize(
    ("name", "how", "why"),
    [
        ("infllm", {}, "InfLLMRead"),
        ("pqcache", {"placement": "disk"}, "placement=disk"),
        ("pqcache", {"reuse_steps": 2}, "reuse_steps=2"),
    ],
)
def test_what_cannot_attend_together_says_why(name: str, how: dict[str, Any], why: str) -> None:
    with attached(tiny("llama"), small(name), budget=0.5, calibration=prompt(64, seed=9), **how) as kv:
        assert reason(Engine(kv)) == CHECKED  # the first answer of an attachment
        assert why in str(reason(engine_of(kv)))
        assert reason(engine_of(kv, fidelity=2)) == CHECKED
        engine = engine_of(kv)
        engine.tracer = Tracer(torch.device("cpu"))
        assert "trace=on" in str(reason(engine))


def compilable(name: str) -> Any:
    """A model whose heads have a size that every compiled kernel of the method is built for."""
    if name != "shadowkv":
        return tiny("llama")
    config = AutoConfig.for_model("llama", **SHAPE | {"num_attention_heads": 4})
    return AutoModelForCausalLM.from_config(config).eval()


def attach_compiled(name: str, budget: float = 0.5) -> Any:
    return attach(small(name), budget) if name != "shadowkv" else attached(compilable(name), small(name), budget=budget)


def assert_together_as_alone(kv: Attachment, prompts: Sequence[Tensor], graphs: Tape | None) -> None:
    plain, engine = engine_of(kv), engine_of(kv, graphs=graphs)
    engine.forward.stores = graphs is not None  # as on a GPU
    answers = in_one_batch(engine, prompts, 6)
    assert (engine.one_by_one, engine.plain_steps) == (None, None)
    for made, ids in zip(answers, prompts, strict=True):
        alone = plain.generate(ids, max_new_tokens=6)
        assert (made.tokens, made.measured) == (alone.tokens, alone.measured)


@pytest.mark.tokens
@pytest.mark.parametrize(
    "name", every(2, ["pqcache", "quest", "rocketkv", "infinigen", "snapkv", "sparq", "adakv", "coded"])
)
def test_members_whose_tokens_are_codes_attend_together(name: str) -> None:
    """Codes fill no block, one, or several (Ada-KV's heads differ), and behind them stand tokens that fill none. The
    same in captured steps."""
    unequal, alike = [prompt(30), prompt(61, batch=2), prompt(90), prompt(24)], [prompt(n) for n in (100, 119, 97)]
    how: dict[str, Any] = {"calibration": prompt(64, seed=9)}
    for prompts, budget, graphs, codec in (
        (unequal, 20, None, "int4g16"),
        (alike, 0.5, Tape(), "int4g16h"),
        (alike, 0.5, Tape(), "tq3q"),
        (alike, 0.5, Tape(), "int4+3/int2g16"),
        (unequal, 20, None, "nvfp4"),
    ):
        with attached(tiny("llama"), small(name), budget=budget, codec=codec_of(codec), **how) as kv:
            assert_together_as_alone(kv, prompts, graphs)


@pytest.mark.tokens
@pytest.mark.parametrize("codec", ["int4g16h", "tq3"])
@torch.inference_mode()
def test_what_steps_alone_over_codes_is_captured_too(codec: str) -> None:
    """H2O weighs every decoded key."""
    with attached(tiny("llama"), small("h2o"), budget=0.4, codec=codec_of(codec)) as kv:
        plain, captured = engine_of(kv), engine_of(kv, graphs=Tape())
        wanted, made = (engine.generate(prompt(90), max_new_tokens=8).tokens for engine in (plain, captured))
        assert (made, captured.plain_steps) == (wanted, None)


def wide() -> Any:
    """A model whose heads have a size that kernels over codes are built for."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE | {"head_dim": 64})).eval()


@pytest.mark.tokens
@pytest.mark.parametrize(("residual", "group"), [(16, 8), (48, 16)])
def test_members_under_kivi_attend_together_while_none_quantises(residual: int, group: int) -> None:
    """One has no codes yet, others have a block of them or several; the values of the last block become codes.
    Groups of 8 are left to plain torch."""
    unequal = [prompt(9), prompt(residual + 2, batch=2), prompt(2 * residual), prompt(3 * residual + 5)]
    alike = [prompt(2 * residual + count, seed=count) for count in (3, 5, 6)]
    for prompts, graphs in ((unequal, None), (alike, Tape())):
        with attached(wide(), Kivi(residual=residual, group=group), budget=None) as kv:
            assert_together_as_alone(kv, prompts, graphs)


@pytest.mark.tokens
def test_members_of_different_methods_get_what_each_gets_alone() -> None:
    """Caches of several attachments may run together."""
    few, ids = small("sparq"), prompt(90, seed=7)
    with attach(replace(few, r=2), 0.3) as kv:
        others = replace(few, r=16), small("pqcache"), small("snapkv"), Full()
        engines = [
            engine_of(kv),
            *(engine_of(Attachment(kv.model, method, AttachOptions(budget=0.3))) for method in others),
        ]
        batch = RunningBatch(engines[0])
        slots = [engine.join(batch, ids, max_new_tokens=9) for engine in engines]
        while batch.sequences:
            batch.step()
        wanted = [engine.generate(ids, max_new_tokens=9).tokens for engine in engines]
    assert [slot.out.tokens for slot in slots] == wanted


def held(cache: KVCache) -> list[dict[str, Any]]:
    """What steps change of a cache, by layer."""
    seen = []
    for layer in cache.layers:
        changed = {
            name: getattr(policy, name, None)
            for policy in layer.policies
            for name in ("value_sum", "covered", "received")
        }
        read = layer.read_positions()
        chosen = None if read is None else [sorted({*head} - {-1}) for head in read.flatten(0, 1).tolist()]
        counts = {"seen": layer.seen, "stored": layer.stored, "tokens": cache.num_tokens}
        seen.append({"kv": layer.store.per_head(), "rows": chosen, **counts, **changed})
    return seen


@pytest.mark.tokens
@together
def test_one_that_leaves_takes_along_what_its_steps_have_changed(name: str) -> None:
    with attach(small(name), 0.5) as kv:
        engine = engine_of(kv)
        batch, [_, leaving, _] = joined(engine, 61, 74, 90)
        other, [single] = joined(engine, 74)
        for _ in range(3):
            batch.step()
            other.step()
        left, wanted = batch.leave(leaving), other.leave(single)
        assert left.tokens == wanted.tokens
        assert_close(held(leaving.cache), held(single.cache), atol=1e-4, rtol=1e-4)
        alone, fed = RunningBatch(engine), torch.tensor(left.tokens)[:, -1:]
        rest = alone.join(leaving.cache, None, fed, began=perf_counter(), max_new_tokens=5)
        while alone.sequences:
            alone.step()
        whole = engine.generate(prompt(74, seed=74), max_new_tokens=9)
    assert [left.tokens[0] + rest.out.tokens[0]] == whole.tokens


# A step is captured once for a size: members join and leave by what is written to its tensors.

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
@pytest.mark.parametrize("name", slow_if(lambda name: name not in QUICK, TOGETHER))
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
            made.append(in_one_batch(engine, prompts, 6))
            assert (engine.one_by_one, engine.plain_steps) == (None, None)
    for one, *together in zip(alone, *made, strict=True):
        before = one.measured.pop("moved_bytes_per_step")
        for other in together:
            assert 0 < other.measured.pop("moved_bytes_per_step") <= before
            assert (other.tokens, other.measured) == (one.tokens, one.measured)
            assert 0 < other.measured["hit_rate"] < 1
