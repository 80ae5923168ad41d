"""What holds for every method, a newcomer's too, because the contract sees to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from methods.base import Budget, CacheState, KVLayer, LayerSpec, Method
from methods.infllm import InfLLM
from methods.layers import Keep, Layer, Policy, Read, Select
from methods.quest import Quest, QuestRead
from methods.sparq import SparQ
from methods.streaming import Streaming


@dataclass(frozen=True, kw_only=True)
class Newcomer(Method):
    """Says nothing of lists."""

    layers: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        return [Layer(spec, cache, self) for spec in specs]


def test_lists_become_tuples() -> None:
    made = Newcomer(layers=[0, 1], pairs=[[0, 1], [2, 3]])  # type: ignore[arg-type,list-item]
    assert made == Newcomer(layers=(0, 1), pairs=((0, 1), (2, 3)))
    assert hash(made) == hash(Newcomer(layers=(0, 1), pairs=((0, 1), (2, 3))))
    assert replace(made, layers=[5]).layers == (5,)  # type: ignore[arg-type]
    assert Quest(dense_layers=[0]) == Quest(dense_layers=(0,))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Layer, Policy, Keep, Read, Select, QuestRead])
def test_that_a_step_can_be_captured_is_not_inherited(kind: type[KVLayer | Policy]) -> None:
    assert kind.capturable
    assert not type("Heir", (kind,), {}).capturable
    assert type("Heir", (kind,), {}, capturable=True).capturable


def test_whether_a_paper_counts_otherwise_follows_from_how_it_counts() -> None:
    assert not Streaming(sinks=4).paper_differs
    assert SparQ(sinks=4).paper_differs
    assert not SparQ(sinks=0).paper_differs
    assert InfLLM(n_init=0).paper_differs  # the block that is not full yet


@pytest.mark.parametrize(
    ("asked", "sealed", "tokens"),
    [(0.2, 99, 19), (0.999, 1000, 999), (0.999, 10, 9), (0.01, 5, 1), (1.0, 5, 5), (1, 5, 1), (7, 5, 5)],
)
def test_a_share_is_rounded_down_to_no_less_than_a_token(asked: float, sealed: int, tokens: int) -> None:
    budget = Budget(asked)
    assert budget.tokens(sealed, 0) == tokens
    assert budget.covers(sealed, 0) == (tokens == sealed)


@pytest.mark.parametrize("sealed", [7, 100, 1316])
def test_the_least_budget_that_is_named_is_enough_and_the_one_below_is_not(sealed: int) -> None:
    for needed in (1, 3, sealed // 2, sealed):
        number = Budget(0.5).least(needed, sealed, 0)
        assert Budget(number).tokens(sealed, 0) == needed
        assert needed == 1 or Budget(number - 1).tokens(sealed, 0) < needed
