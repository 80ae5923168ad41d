"""`budget_rule=paper` against the papers' own formulas; one split for all methods that have one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from methods.base import Budget, BudgetError, CacheState, Method, PaperBudget, paper_differs
from methods.full import Full
from methods.h2o import H2O
from methods.infllm import InfLLM
from methods.lm_infinite import LMInfinite
from methods.oracle import Oracle
from methods.pqcache import PQCache
from methods.pyramidkv import PyramidKV
from methods.quest import Quest
from methods.rocketkv import RocketKV
from methods.shadowkv import ShadowKV
from methods.snapkv import SnapKV
from methods.sparq import SparQ
from methods.streaming import Streaming
from tests.methods.synthetic import Sequences, Shape
from tests.methods.test_contract import in_places, small
from tests.methods.test_costs import assert_near, measured, method_of

RHO = 0.2
LENGTHS = [1316, 8192]


def read(method: Method, budget: float, sealed: int, **more: Any) -> int:
    return PaperBudget(budget, count=method.paper_tokens, **more).tokens(sealed, 0)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("method", [PQCache(), Oracle(), H2O(sinks=32)], ids=["pqcache", "oracle", "h2o"])
def test_pqcaches_comparison_takes_the_share_behind_its_sinks(length: int, method: Any) -> None:
    """C_loc = C_top = int((s - 32) * rho / 2), beside 32 sinks; one more where both were rounded down."""
    half = int((length - 32) * RHO * 0.5)
    plan = method.split(read(method, RHO, length))
    assert plan.sinks == 32
    assert plan.local == half
    assert plan.top - half in (0, 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_sparqs_k_is_a_share_of_the_prompt_and_holds_the_window(length: int) -> None:
    method = SparQ(r=1, sinks=32, recent_ratio=0.5)
    plan = method.split(read(method, RHO, length))
    assert plan == (32, int(length * RHO * 0.5), int(length * RHO) - int(length * RHO * 0.5))
    assert not paper_differs(SparQ())  # without sinks k is our budget


@pytest.mark.parametrize("length", [8192, 8193, 8311])
def test_infllm_reads_first_tokens_and_the_unfinished_block_on_top(length: int) -> None:
    """n_local and whole blocks are the share of what lies behind the first tokens, the remainder comes on top."""
    s = Sequences(Shape(2, 2, 64), length + 1)
    method = InfLLM(n_init=32, block=128, local_ratio=0.5, exc_block=4096)
    request = replace(s.request(None), budget=PaperBudget(RHO, count=method.paper_tokens))
    (layer,) = method.start(s.specs, CacheState(request))
    s.seal([layer], 0, length)
    s.decode([layer], length)
    share = int((length - 32) * RHO)
    blocks = int(share * 0.5 / 128)
    far = length - 32 - (share - blocks * 128)  # behind the first tokens, before the window
    assert layer.attended.prompt == 32 + share + far % 128


@pytest.mark.parametrize(("asked", "outliers"), [(2048, 384), (1024, 24 * 8)])
@pytest.mark.parametrize("length", [16384, 16391])
def test_shadowkvs_budget_is_of_retrieved_tokens_alone(asked: int, outliers: int, length: int) -> None:
    """48 outlier chunks for 2048 tokens, 24 for 1024; 32 to 39 local tokens."""
    method = ShadowKV()
    plan = method.plan(read(method, asked, length), length)
    assert plan.top * 8 == asked
    assert plan.outliers * 8 == outliers
    assert plan.local == 32 + length % 8


def test_rocketkvs_budget_holds_the_reads_of_its_index() -> None:
    """The released code: topk = token_budget // 2, c = length / token_budget; 10.3 of c = 64 by eviction."""
    method, length, budget = RocketKV(), 65536, 1024
    selected = read(method, budget, length)
    assert selected == 512
    kept = method.keeps(selected, length)
    assert length / kept == pytest.approx(64 ** (0.2 + 0.06 * 6), rel=1e-3)
    size, r = method.pages(selected, kept, 128)
    indexed = r * kept / size / (2 * 128)  # of keys and values
    assert selected + indexed == pytest.approx(budget, rel=0.02)
    assert read(method, 0.2, length) == int(0.2 * length) // 2


@pytest.mark.parametrize(
    ("name", "placement"), [case for case in in_places("device", "host") if paper_differs(small(case[0]))]
)
def test_costs_hold_and_no_more_is_read_than_the_paper_reads(name: str, placement: str) -> None:
    method = method_of(name)
    budget = PaperBudget(0.2, count=method.paper_tokens)
    assert (budget.tokens(400, 0) > Budget(0.2).tokens(400, 0)) == (name != "rocketkv")
    assert_near(*measured(method, budget, placement))


@pytest.mark.parametrize("rule", ["read", "paper"])
def test_the_least_legal_budget_is_named(rule: str) -> None:
    method = InfLLM(n_init=2, block=20, repr_topk=1)
    plain = Budget(5) if rule == "read" else PaperBudget(5, count=method.paper_tokens)
    number = 42 if rule == "read" else 21
    with pytest.raises(BudgetError, match=f"at least {number}, or make"):
        method.check(plain)
    method.check(replace(plain, asked=number))
    with pytest.raises(BudgetError):
        method.check(replace(plain, asked=number - 1))


def test_one_split_for_all_that_have_one() -> None:
    for method in (PQCache(), Oracle(), H2O(), SparQ()):
        plan = method.with_windows(sinks=4, recent_ratio=0.25).split(104)
        assert plan == (4, 25, 75)
    assert InfLLM().with_windows(sinks=4, recent_ratio=0.25) == InfLLM(n_init=4, local_ratio=0.25)
    assert LMInfinite().with_windows(sinks=4, recent_ratio=0.25) == LMInfinite(n_init=4)
    assert Streaming(sinks=9).with_windows(sinks=4, recent_ratio=0.25) == Streaming(sinks=4)
    for kept in (Full(), Quest(), SnapKV(), PyramidKV(), ShadowKV()):
        assert kept.with_windows(sinks=4, recent_ratio=0.25) == kept
