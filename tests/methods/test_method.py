"""What holds for every method, a newcomer's too, because the contract sees to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from methods.adakv import AdaKV
from methods.base import Budget, CacheState, KVLayer, LayerSpec, Method
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.infllm import InfLLM
from methods.kivi import Kivi
from methods.layers import Keep, Layer, Policy, Read, Select
from methods.lm_infinite import LMInfinite
from methods.pqcache import PQCache
from methods.quest import Quest, QuestRead
from methods.rocketkv import RocketKV
from methods.shadowkv import ShadowKV
from methods.snapkv import SnapKV
from methods.sparq import SparQ
from methods.streaming import Streaming
from tests.methods.synthetic import SHAPES, Sequences


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


@pytest.mark.parametrize(
    ("asked", "sealed", "tokens"),
    [(0.2, 99, 19), (0.999, 1000, 999), (0.999, 10, 9), (0.01, 5, 1), (1.0, 5, 5), (1, 5, 1), (7, 5, 5)],
)
def test_a_share_is_rounded_down_to_no_less_than_a_token(asked: float, sealed: int, tokens: int) -> None:
    budget = Budget(asked)
    assert budget.tokens(sealed, 0) == tokens
    assert budget.covers(sealed, 0) == (tokens == sealed)


WRONG: dict[Method, dict[str, tuple[Any, ...]]] = {  # method -> parameter -> values that cannot be
    AdaKV(): {"floor": (-0.1, 1.5), "select_per": ("query_head",)},
    H2O(): {"sinks": (-1,), "recent_ratio": (1.0,), "compensation": ("x",)},
    InfiniGen(): {
        "alpha": (-1.0,),
        "partial_ratio": (0.0,),
        "dense_layers": ((1,),),
        "column_rule": ("key",),
        "group_rank": ("sum",),
        "pool_policy": ("mru",),
        "pool_capacity": (0, -1, 1.5, 0.0, True, "0.8"),
    },
    InfLLM(block=8): {"n_init": (-1,), "block": (0,), "local_ratio": (0.0,), "repr_topk": (9,), "exc_block": (0,)},
    Kivi(): {"bits": (3,), "residual": (100, 0)},
    LMInfinite(): {"n_init": (-1,)},
    PQCache(): {"m": (0,), "b": (0, 17), "sinks": (-1,), "iterations": (0, -1, [1.0, 2.0], [0, 0, 0, 0, 0, 0, -1.0])},
    PQCache(cache_tokens=4096): {"cache_tokens": (3,), "cache_block": (0,), "cache_offered": (0,)},
    Quest(): {"page_size": (0,), "min_pages": (0,), "select_per": ("head",)},
    RocketKV(): {"split": (1.5, -0.1), "page_size": (0,), "r": (0,), "select_per": ("query_head",)},
    ShadowKV(): {"chunk": (0,), "rank": (1.5, 0), "outlier_share": (1.0,), "solver": ("svd",), "local_chunks": (-1,)},
    SnapKV(): {"window": (0,), "kernel": (4,), "pooling": ("mean",), "select_per": ("head",)},
    SparQ(): {"r": (0,)},
    Streaming(): {"sinks": (-1,), "positions": ("true",)},
}


@pytest.mark.parametrize("method", WRONG, ids=str)
def test_a_parameter_that_cannot_be_is_named(method: Method) -> None:
    for name, values in WRONG[method].items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                replace(method, **{name: value})  # type: ignore[type-var]


@pytest.mark.parametrize("method", [PQCache(m=5), SparQ(r=65), RocketKV(r=65)], ids=repr)
def test_a_parameter_that_does_not_fit_the_heads_is_named(method: Method) -> None:
    with pytest.raises(ValueError, match=r"(m=5|r=65).*head size 64"):
        method.check_model(Sequences(SHAPES[0], 9).specs[0])
