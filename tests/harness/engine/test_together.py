"""Sequences of a running batch take a layer's step by one call of its policies, however many they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from harness.engine.attach import Attachment, attached
from harness.engine.attach_options import AttachOptions
from harness.engine.batch.cache import CHECKED, SlotsCache
from harness.engine.batch.running import RunningBatch
from harness.engine.batch.running_sequence import RunningSequence
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.trace import Tracer
from methods.full import Full
from methods.kivi import Kivi
from methods.tiers.codecs import codec_of
from tests.dispatched import operations
from tests.methods.test_contract import attach, small
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


def slots_of(engine: Engine, count: int) -> SlotsCache:
    """`count` sealed sequences whose lengths and budgets all differ, behind their first step."""
    caches = []
    for ids in (prompt(60 + 23 * i, seed=i) for i in range(count)):
        caches.append(engine.cache(ids, 8))
        engine.prefill(caches[-1], ids)
        caches[-1].seal()
    slots = SlotsCache(caches)
    step(engine, slots)
    return slots


def step(engine: Engine, slots: SlotsCache) -> Tensor:
    return engine.decode(torch.full((len(slots.members), 1), 5), slots, None)


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


COUNTS = (2, 4, 8)  # of sequences


def launched(engine: Engine, count: int) -> dict[str, int]:
    """Count how often a step of `count` members calls each operation."""
    slots = slots_of(engine, count)
    with operations() as called:
        step(engine, slots)
    return Counter(name for name, _ in called)


def assert_together_as_alone(kv: Attachment, prompts: Sequence[Tensor], graphs: Tape | None) -> None:
    plain, engine = engine_of(kv), engine_of(kv, graphs=graphs)
    engine.forward.stores = graphs is not None  # as on a GPU
    batch = RunningBatch(engine)
    slots = [engine.join(batch, ids, max_new_tokens=6) for ids in prompts]
    while batch.sequences:
        batch.step()
    assert (engine.one_by_one, engine.plain_steps) == (None, None)
    for slot, ids in zip(slots, prompts, strict=True):
        alone = plain.generate(ids, max_new_tokens=6)
        assert (slot.out.tokens, slot.out.measured) == (alone.tokens, alone.measured)


@together
@torch.inference_mode()
def test_a_step_launches_no_more_for_more_members(name: str) -> None:
    with attach_compiled(name) as kv:
        engine = engine_of(kv)
        two, *more = [launched(engine, count) for count in COUNTS]
    assert sum(two.values())
    assert more == [two] * len(more)


@pytest.mark.tokens
@pytest.mark.parametrize("name", ["pqcache", "quest", "rocketkv", "infinigen", "sparq", "coded", "snapkv", "adakv"])
def test_members_whose_tokens_are_codes_attend_together(name: str) -> None:
    """Codes fill no block, one, or several, and behind them stand tokens that fill none. The same in captured steps."""
    unequal, alike = [prompt(30), prompt(61, batch=2), prompt(90), prompt(24)], [prompt(n) for n in (100, 119, 97)]
    how: dict[str, Any] = {"calibration": prompt(64, seed=9)}
    for prompts, budget, graphs, codec in (
        (unequal, 20, None, "int4g16"),
        (alike, 0.5, Tape(), "int4g16h"),
        (alike, 0.5, Tape(), "tq3q"),
    ):
        written = codec_of("tq4" if name == "adakv" else codec)  # its heads would fill different numbers of blocks
        with attached(tiny("llama"), small(name), budget=budget, codec=written, **how) as kv:
            assert_together_as_alone(kv, prompts, graphs)


@pytest.mark.tokens
@pytest.mark.parametrize(("name", "codec"), [("h2o", "int4g16h"), ("h2o", "tq3"), ("adakv", "int4g16")])
@torch.inference_mode()
def test_what_steps_alone_over_codes_is_captured_too(name: str, codec: str) -> None:
    """H2O weighs every decoded key, and Ada-KV's heads fill different numbers of blocks."""
    with attached(tiny("llama"), small(name), budget=0.4, codec=codec_of(codec)) as kv:
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
