"""A budget for generated tokens: what is kept of them, and what is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness import Engine, attached
from methods.abilities import ability, asked, refuse
from methods.abilities.bounded_answer import BoundedAnswer, CountedAnswer
from methods.base import Budget, BudgetError
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.infllm import InfLLM
from methods.oracle import Oracle
from methods.snapkv import SnapKV
from tests.methods.synthetic import SHAPES, Sequences, attention
from tests.methods.test_contract import small, walked
from tests.tiny import prompt, tiny

PROMPT, STEPS, MOST = 60, 30, 8
DROPPED = MOST // 8


def read_at(start: int, position: int) -> list[int]:
    """Generated tokens that the step at `position` reads when the latest stay: one more leaves as each comes in."""
    return list(range(max(start, position - MOST + 1), position + 1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", [Oracle(sinks=2), SnapKV(window=4, kernel=3)], ids=["oracle", "snapkv"])
def test_the_latest_are_kept_and_read(shape: Any, method: Any) -> None:
    s = Sequences(shape, PROMPT + STEPS + 10)
    (layer,) = s.start(method, Budget(20, generated=MOST))
    s.seal([layer], 0, PROMPT)
    for position in range(PROMPT, PROMPT + STEPS):
        (out,) = s.decode([layer], position)
        read = [[[*head, *read_at(PROMPT, position)] for head in one] for one in layer.read_positions().tolist()]  # type: ignore[union-attr]
        wanted = attention(s.q(0)[:, :, position, None], s.k(0), s.v[0], read, shape.dim**-0.5)
        torch.testing.assert_close(out, wanted)
        assert layer.attended == (20, len(read_at(PROMPT, position)))
    s.seal([layer], PROMPT + STEPS, s.length - 1)
    s.decode([layer], s.length - 1)
    left = {*range(PROMPT), *read_at(PROMPT, PROMPT + STEPS - 1), *range(PROMPT + STEPS, s.length - 1)}
    assert {p for one in layer.read_positions().tolist() for head in one for p in head} <= left  # type: ignore[union-attr]


def test_h2o_keeps_the_generated_tokens_that_drew_most_attention() -> None:
    s = Sequences(SHAPES[1], PROMPT + STEPS)
    method = H2O(recent_ratio=0.5)
    (layer,) = s.start(method, Budget(20, generated=MOST))
    s.seal([layer], 0, PROMPT)
    kept = [[list(range(0)) for _ in range(2)] for _ in range(2)]
    drawn: dict[tuple[int, int, int], float] = {}
    for position in range(PROMPT, PROMPT + STEPS):
        for b in range(2):
            for g in range(2):
                mine = kept[b][g]
                if len(mine) == MOST:
                    size = MOST - DROPPED
                    recent = mine[len(mine) - int(size * 0.5) :]
                    others = sorted(mine[: len(mine) - len(recent)], key=lambda p: -drawn[b, g, p])
                    kept[b][g] = mine = sorted([*others[: size - len(recent)], *recent])
                mine.append(position)
        before = layer.read_positions()
        (out,) = s.decode([layer], position)
        read = [
            [[*head, *mine] for head, mine in zip(*pair, strict=True)]
            for pair in zip(before.tolist(), kept, strict=True)
        ]
        q, k = s.q(0)[:, :, position, None], s.k(0)
        torch.testing.assert_close(out, attention(q, k, s.v[0], read, s.shape.dim**-0.5))
        for b in range(2):
            for h in range(s.shape.heads):
                g = h // (s.shape.heads // 2)
                weights = (k[b, g, read[b][g]] @ q[b, h, 0] * s.shape.dim**-0.5).softmax(0).tolist()
                for p, weight in zip(read[b][g], weights, strict=True):
                    drawn[b, g, p] = drawn.get((b, g, p), 0.0) + weight
    assert any(mine != read_at(PROMPT, PROMPT + STEPS - 1) for one in kept for mine in one)
    at = layer.stored_positions().unsqueeze(-1).expand(-1, -1, -1, SHAPES[1].dim)
    assert torch.equal(layer.store.k, s.k(0).gather(2, at))  # a further turn is told where they stood


@pytest.mark.tokens
@walked
def test_as_many_as_are_generated_change_nothing_and_fewer_are_never_exceeded(name: str) -> None:
    method = small(name)
    if BoundedAnswer.refusal(method) or ability(method, CountedAnswer):
        pytest.skip("it takes no budget of generated tokens")
    made = {}
    for most in (None, 24, MOST):
        with attached(tiny("llama"), method, budget=Budget(0.4, generated=most), calibration=prompt(64, seed=9)) as kv:
            made[most] = Engine(kv).generate(prompt(71), max_new_tokens=24)
    assert made[24].tokens == made[None].tokens
    wholes = len(made[MOST].tokens[0]) - 1
    total = made[MOST].measured["attended_total"] - made[MOST].measured["attended_prompt"]  # type: ignore[operator]
    if not method.uses_budget:
        assert total == pytest.approx((wholes + 1) / 2)
    else:
        dense = 1 / 3 if getattr(method, "dense_layers", ()) else 0
        limited = sum(min(n, MOST) for n in range(1, wholes + 1)) / wholes
        assert total == pytest.approx(dense * (wholes + 1) / 2 + (1 - dense) * limited)


def test_methods_that_need_all_refuse_by_name() -> None:
    budget = Budget(20, generated=MOST)
    with pytest.raises(BudgetError, match="InfLLM takes no budget of generated"):
        refuse(InfLLM(), asked(budget))
    with pytest.raises(BudgetError, match="Counts takes no budget of generated tokens, for its budget counts them"):
        refuse(type("Counts", (SnapKV,), {"abilities": (CountedAnswer(),)})(), asked(budget))
    with pytest.raises(BudgetError, match="limited pool"):
        InfiniGen(pool_capacity=0.5).check(budget)
    with pytest.raises(BudgetError, match="budget_generated=0"):
        replace(budget, generated=0)
