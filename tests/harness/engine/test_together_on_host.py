"""Sequences whose rows lie on the host take a layer's step by one call of its policies, however many they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.engine.attach import attached
from harness.engine.batch.running import RunningBatch
from methods.base import Method
from methods.kivi import Kivi
from methods.shadowkv import ShadowKV
from methods.tiers.codec import Codec
from methods.tiers.floats import FloatCodec
from methods.tiers.integers import IntCodec
from methods.tiers.transfer.engine import TransferEngine
from tests.harness.engine.test_kept_steps import engines, in_a_batch, seen
from tests.harness.engine.test_together import assert_together_as_alone, compilable, engine_of, launched, reason
from tests.methods.test_contract import small
from tests.tape import Tape
from tests.tiny import prompt

ON_HOST = ("full_offloaded", "pqcache", "quest", "sparq", "rocketkv", "infinigen", "shadowkv")
CAPTURED = {"sparq": 2, "rocketkv": 2}  # as in test_kept_steps.py
on_host = pytest.mark.parametrize("name", ON_HOST)
UNEQUAL = [prompt(30), prompt(61, batch=2), prompt(90), prompt(33)]  # a budget of 40 covers two of them


def attach(name: str, budget: float | int = 40, **how: Any) -> Any:
    asked = {"budget": None if name.startswith("full") else budget, "calibration": prompt(64, seed=9)}
    return attached(compilable(name), method_of(name), placement="host", **asked, **how)


def method_of(name: str) -> Method:
    """A small method. Of several heads ShadowKV's hit cache moves as many chunks for each, alone and where it may wait:
    here it moves what it reads."""
    method = small(name)
    return replace(method, hit_cache=False) if isinstance(method, ShadowKV) else method


@pytest.mark.tokens
@on_host
def test_members_get_and_move_what_each_does_alone(name: str) -> None:
    with attach(name) as kv:
        assert_together_as_alone(kv, UNEQUAL, None)


@pytest.mark.tokens
@pytest.mark.parametrize("codec", [IntCodec(bits=4, group=16), FloatCodec()], ids=["int4", "fp8"])
@pytest.mark.parametrize("name", ["pqcache", "quest", "sparq"])
def test_so_do_members_whose_tokens_are_codes(name: str, codec: Codec) -> None:
    alike = [prompt(length) for length in (100, 119, 97)]
    for prompts, budget, graphs in ((UNEQUAL, 20, None), (alike, 0.5, Tape())):
        with attach(name, budget, codec=codec) as kv:
            assert_together_as_alone(kv, prompts, graphs)


@pytest.mark.tokens
@on_host
def test_examples_that_come_and_go_are_captured_once_for_each_size(name: str) -> None:
    with attach(name, 0.5) as kv:
        plain, engine, tape = engines(kv)
        made = in_a_batch(engine, 4, few=6)
        alone = in_a_batch(plain, 1, few=6)
    assert engine.plain_steps is None
    assert [seen(one) for one in made] == [seen(one) for one in alone]
    assert made[0].measured["moved_bytes_per_step"] > 0
    assert tape.captured <= 3 * CAPTURED.get(name, 1)
    assert not tape.dropped


@on_host
@torch.inference_mode()
def test_a_step_launches_no_more_for_more_members(name: str) -> None:
    with attach(name, 0.5) as kv:
        engine = engine_of(kv)
        two, four = (launched(engine, count) for count in (2, 4))
    assert two == four
    assert sum(two.values())


@pytest.mark.tokens
def test_a_turn_goes_on_where_prompts_are_clustered_beside_later_layers() -> None:
    """Whoever joins others waits for its clusters first."""
    with attach("pqcache") as kv:
        wanted = [engine_of(kv).generate(ids, max_new_tokens=5).tokens for ids in UNEQUAL]
        kv.engine, kv.ahead = TransferEngine(works=True), True
        engine = engine_of(kv)
        batch = RunningBatch(engine)
        slots = [engine.join(batch, ids, max_new_tokens=5) for ids in UNEQUAL]
        while batch.sequences:
            batch.step()
    assert engine.one_by_one is None
    assert [slot.out.tokens for slot in slots] == wanted


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


def test_codes_of_kivi_come_for_one_after_the_other() -> None:
    with attached(compilable("kivi"), Kivi(residual=48, group=8), placement="host") as kv:
        assert "codes of placement=host" in str(reason(engine_of(kv)))
