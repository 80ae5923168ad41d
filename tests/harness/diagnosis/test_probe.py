"""The probe against plain torch, and at its limits, on a tiny random model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from harness.config.plugins import build
from harness.diagnosis.probe import Reads
from harness.diagnosis.replay import Replay, Replayed
from harness.engine.attach import attached
from harness.engine.engine import Engine
from methods.base import Budget, Method
from methods.full import Full
from methods.oracle import Oracle
from methods.quest import Quest
from methods.snapkv import SnapKV
from methods.streaming import Streaming
from tests.methods.test_contract import QUICK
from tests.own_methods import own_methods
from tests.quick import mostly_slow, slow_if
from tests.tiny import eager, prompt, tiny

LENGTH, NEW = 240, 6
IDS = prompt(LENGTH)[0].tolist()
CALIBRATION = prompt(2048, seed=3)
MIDDLE = range(60, 70)
OURS = own_methods()
METHODS = [build(entry.values(), "method") for entry in OURS]
names = [entry.name for entry in OURS]


def replayed(
    method: Method,
    reads: Reads = "own",
    budget: float | Budget = 0.3,
    needle: Sequence[int] = MIDDLE,
    context: int = LENGTH,
) -> Replayed:
    def ending(new: int) -> dict[str, Any]:
        return {"max_new_tokens": new}

    with attached(tiny("llama"), method, budget=budget, calibration=CALIBRATION) as kv, torch.inference_mode():
        return Replay(IDS, context, needle, ending, NEW).under(kv).answer(reads)


def own_tokens(method: Method, budget: float = 0.3, context: int | None = None) -> list[int]:
    with attached(tiny("llama"), method, budget=budget, calibration=CALIBRATION) as kv:
        made = Engine(kv).generate(torch.tensor([IDS]), max_new_tokens=NEW, context_tokens=context)
    return made.tokens[0]


@pytest.mark.tokens
@pytest.mark.parametrize(
    "method",
    [Oracle(sinks=2), SnapKV(window=4, kernel=3), SnapKV(window=4, kernel=3, select_per="query_head")],
    ids=str,
)
def test_dropped_generated_tokens_are_not_among_those_it_read(method: Method) -> None:
    """Exact attention over what it read is what it does, behind a question that filled the budget of generated ones."""
    budget = Budget(0.3, generated=4)
    own, exact = (replayed(method, reads, budget, context=LENGTH - 20) for reads in ("own", "exact"))
    assert own.tokens == exact.tokens


@pytest.mark.tokens
@pytest.mark.parametrize("method", METHODS, ids=names)
@pytest.mark.parametrize("context", mostly_slow([LENGTH, LENGTH - 20], LENGTH - 20))
def test_following_changes_no_token_of_any_method(method: Method, context: int) -> None:
    found = replayed(method, context=context)
    assert found.tokens == own_tokens(method, context=None if context == LENGTH else context)
    assert found.first == (2 if context == LENGTH else 1)
    assert {len(row) for row in found.held} == {NEW - found.first + 1}
    assert len(found.held) == len(found.mass) == 3
    assert all(0 <= share <= 1 for row in [*found.held, *found.mass] for share in row)


@pytest.mark.tokens
@pytest.mark.parametrize(
    "method", slow_if(lambda method: names[METHODS.index(method)] not in QUICK, METHODS), ids=names
)
def test_one_prefill_gives_the_answers_of_several(method: Method) -> None:
    with attached(tiny("llama"), method, budget=0.3, calibration=CALIBRATION) as kv:
        sealed = Replay(IDS, LENGTH, MIDDLE, lambda new: {"max_new_tokens": new}, NEW).under(kv, more=2)
        longer, *others = sealed.answer(more=2), sealed.answer("exact"), sealed.answer("own")
    assert others == [replayed(method, "exact"), replayed(method)]
    assert longer.tokens[:NEW] == others[1].tokens
    assert len(longer.tokens) == NEW + 2


@pytest.mark.tokens
@pytest.mark.parametrize("method", [m for m in METHODS if m.dense_prefill], ids=lambda m: type(m).__name__)
def test_reading_all_is_full(method: Method) -> None:
    full = own_tokens(Full())
    assert replayed(method, "all").tokens == full
    assert replayed(method, "needle", needle=range(LENGTH)).tokens == full


@pytest.mark.tokens
def test_exact_attention_over_what_it_read_is_oracle_itself() -> None:
    oracle = Oracle(sinks=0, recent_ratio=0.0)
    assert own_tokens(oracle, 0.1) != own_tokens(Full())
    assert replayed(oracle, "exact", 0.1).tokens == own_tokens(oracle, 0.1)


@pytest.mark.tokens
def test_exact_attention_undoes_what_streaming_does_to_positions() -> None:
    moved, still = Streaming(positions="cache"), Streaming(positions="original")
    assert own_tokens(moved, 0.1) != own_tokens(still, 0.1)
    assert replayed(moved, "exact", 0.1).tokens == own_tokens(still, 0.1)


@pytest.mark.tokens
@pytest.mark.parametrize("method", [Quest(dense_layers=[]), SnapKV(select_per="query_head")], ids=["quest", "snapkv"])
def test_query_heads_that_choose_for_themselves_are_followed_one_by_one(method: Method) -> None:
    """The union of a group would give each of them more than it read."""
    assert own_tokens(method) != own_tokens(Full())
    assert replayed(method, "exact").tokens == own_tokens(method)


def test_a_needle_is_held_where_it_was_kept() -> None:
    window = replayed(Streaming(sinks=4), needle=range(LENGTH - 10, LENGTH))
    middle, half = replayed(Streaming(sinks=4)), replayed(Streaming(sinks=4), needle=[0, 1, 60, 61])
    assert {share for row in window.held for share in row} == {1}
    assert {share for row in middle.held + middle.mass for share in row} == {0}
    assert {share for row in half.held for share in row} == {0.5}
    assert middle.evicts
    assert not replayed(Oracle()).evicts


def test_mass_is_what_the_models_own_attention_gives() -> None:
    tokens = own_tokens(Full())
    with torch.no_grad():
        made = eager("llama")(torch.tensor([IDS + tokens[:-1]]), output_attentions=True)
    found = torch.tensor(replayed(Full()).mass)
    steps = range(LENGTH, LENGTH + NEW - 1)
    theirs = torch.stack([layer[0, :, steps][..., list(MIDDLE)].sum(-1).mean(0) for layer in made.attentions])
    assert torch.allclose(found, theirs, atol=6e-4)
    assert found.max() > 0.01
