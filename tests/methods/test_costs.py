"""Every method's cost formula against what its layers really hold and move: a new yaml is tested by being there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.checks import costs as checks
from harness.checks.trial import Trial
from harness.config.plugins import build
from harness.engine.hf import layer_specs
from methods.abilities.kept_codec import KeptCodec
from methods.base import Budget, Cost, CostError, LayerSpec, LayerWorkload, Method
from methods.layers.window import whole_layers
from methods.parts import costs
from methods.shadowkv import ShadowKV
from methods.tiers.codec import Codec
from methods.tiers.codecs import codec_of
from tests.methods.test_contract import _yaml, in_places, small
from tests.quick import slow_if
from tests.tiny import tiny

LENGTH = 400
# what decides how much depends on the text, at the value where it is most
MOST: dict[str, Any] = {"alpha": 1e9, "select_per": "kv_head"}


def method_of(name: str) -> Method:
    method = small(name)
    return replace(method, **{key: value for key, value in MOST.items() if hasattr(method, key)})  # type: ignore[type-var]


def rebuilt(method: Method, case: LayerWorkload) -> int:
    """Bytes that ShadowKV reads of its factors: a trace counts what is rebuilt as what it stands for."""
    if not isinstance(method, ShadowKV) or method.reads_whole(case):
        return 0
    rank = method.rank_of(case.sealed, case.spec.num_kv_heads * case.spec.head_dim)
    return costs.rebuilding(case, rank, method.plan(case.budget, case.sealed).top * method.chunk)


def untraced(method: Method, specs: list[LayerSpec], budget: Budget) -> int:
    cases = [
        LayerWorkload(spec, LENGTH, budget.tokens(LENGTH, spec.index), "device", element_bytes=4) for spec in specs
    ]
    return sum(rebuilt(method, case) for case in cases)


def measured(method: Method, budget: Budget, placement: Any, codec: Codec | None = None) -> tuple[Cost, Cost]:
    """-> the measured cost after the first step, and the formula's"""
    real, formula, _ = checks.measured(Trial(method, tiny("llama")), LENGTH, budget, placement, codec)
    more = untraced(method, whole_layers(layer_specs(tiny("llama"))), budget)
    return real.reading(real.read_bytes_per_step + more), formula


def assert_near(real: Cost, formula: Cost, read: float | None = 0.02) -> None:
    """Within 2 %, in every tier, and what a step moves; what it reads within `read`, if a trace sees that."""
    assert real.held == pytest.approx(formula.held, rel=0.02)
    assert real.moved_bytes_per_step == pytest.approx(formula.moved_bytes_per_step, rel=0.02)
    if read is not None:
        assert real.read_bytes_per_step == pytest.approx(formula.read_bytes_per_step, rel=read)


BUDGETS = Budget(0.2), Budget(150), Budget(0.3, dense_layers=(2,)), Budget(1.0)
# in files there are as many bytes as in host memory
CASES = [(*case, budget) for case in in_places("device", "host", "disk") for budget in BUDGETS]


@pytest.mark.parametrize("case", slow_if(lambda case: case[1] == "disk" and case[2] != BUDGETS[0], CASES), ids=str)
def test_the_formula_is_what_is_held_and_moved(case: tuple[str, str, Budget]) -> None:
    name, placement, budget = case
    assert_near(*measured(method_of(name), budget, placement))


PER_HEAD = ("adakv", "ada_pyramid", "kvzip")  # how many tokens of a head fill no block is as the votes fall
BLOCKS = {"device": "int4+3/int2g16", "host": "int2g16", "disk": "nvfp4"}


@pytest.mark.parametrize(
    ("name", "placement"), [case for case in in_places(*BLOCKS) if not KeptCodec.refusal(small(case[0]))]
)
def test_the_formula_knows_the_codec(name: str, placement: str) -> None:
    """How many of the last tokens are chosen, which fill no block and so are exact, depends on the text."""
    if name not in PER_HEAD:
        assert_near(*measured(method_of(name), Budget(0.2), placement, codec_of(BLOCKS[placement])), read=0.08)
    assert_near(*measured(method_of(name), Budget(0.2), placement, codec_of("tq3q")))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("h2o", {"compensation": "literal"}),
        ("infinigen", {"skew": False, "partial_ratio": 0.5, "column_rule": "query"}),
        ("infllm", {"block": 16}),
        ("pqcache", {"m": 4, "b": 9}),
        ("pyramidkv", {"select_per": "query_head"}),
        ("shadowkv", {"hit_cache": False, "rank": 9, "outlier_share": 0.0}),
        ("snapkv", {"select_per": "query_head"}),
        ("sparq", {"channel_copy": False, "mean_value": False}),
    ],
)
def test_parameters_count(name: str, changes: dict[str, Any]) -> None:
    method = replace(method_of(name), **changes)  # type: ignore[type-var]
    for placement in ("device", "host") if method.offloads else ("device",):
        assert_near(*measured(method, Budget(0.3), placement))


@pytest.mark.parametrize("placement", ["device", "host"])
def test_numbers_of_keys_by_pair_of_codes_count_on_a_gpu_alone(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = replace(method_of("pqcache"), m=2, b=5)  # type: ignore[type-var]
    on_cpu, _ = measured(method, Budget(0.3), placement)
    monkeypatch.setattr("methods.pqcache.queues", lambda device: True)
    real, formula = measured(method, Budget(0.3), placement)
    assert_near(real, formula)
    shape = tiny("llama").config
    assert real.device_bytes - on_cpu.device_bytes == shape.num_hidden_layers * shape.num_key_value_heads * 4 * 32**2


def plain(name: str) -> Any:
    return build(_yaml(name), "method")


@pytest.mark.parametrize("share", [1 / 128, 1 / 64, 1 / 32, 1 / 16])
def test_communication_as_in_the_papers_comparison(share: float) -> None:
    steps = round(128 * share)
    pq = plain("pqcache").at_communication(share, 128)
    assert plain("pqcache").at_communication(1 / 256, 128).m == 1
    assert (pq.m, pq.b) == (2 * steps, 6 if steps == 1 else 8)
    assert plain("sparq").at_communication(share, 128).r == steps
    assert replace(plain("infllm"), block=128).at_communication(share, 128).repr_topk == steps
    assert plain("h2o").at_communication(1 / 128, 128).compensation == "literal"
    for name in ("full", "oracle", "streaming", "lm_infinite", "quest", "snapkv", "pyramidkv", "shadowkv", "infinigen"):
        assert plain(name).at_communication(share, 128) == plain(name)


@pytest.mark.parametrize(
    ("name", "share", "remedy"),
    [
        ("pqcache", 1 / 512, "0.0078.* times such a divisor"),
        ("pqcache", 0.01, "1.28 sub-vectors"),
        ("sparq", 1 / 128, "choose 0.015625 to 1"),
        ("infllm", 1 / 128, "method.block to 128"),
        ("h2o", 1 / 64, "0.0078125"),
    ],
)
def test_a_share_that_cannot_be_met_is_refused_by_name(name: str, share: float, remedy: str) -> None:
    with pytest.raises(CostError, match=f"comm={share}.*{remedy}"):
        plain(name).at_communication(share, 64)
