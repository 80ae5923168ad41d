"""Every method and every preset keeps its contract: a new yaml is tested by being there. The checks are those of
`python -m harness.check` (harness/checks/contract.py), on smaller prompts."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from harness.checks.contract import CHECKS, Check
from harness.checks.trial import DoesNotApply, Step, Trial, difference
from harness.config.catalogue import CONF, Entry
from harness.config.plugins import build
from harness.engine.attach import attached
from methods.base import Method
from methods.snapkv import SnapKV
from tests.own_methods import own_methods
from tests.quick import mostly_slow
from tests.tiny import prompt, tiny

NAMES = [entry.name for entry in own_methods()]
NAMES += ["kvpress"] * (find_spec("kvpress") is not None)  # one of its presses; tests/harness/bridges has the others
MOST = 24  # prompt tokens that every method's sinks and windows must fit into here
SMALL: dict[str, Any] = {  # parameters with these names, for prompts of 60 to 100 tokens
    "b": 3,
    "beta": 2.0,
    "block": 4,
    "buffer": 3,
    "calibration_tokens": 64,
    "chunk": 2,
    "dense_layers": [0],
    "exc_block": 8,
    "kernel": 3,
    "local_chunks": 2,
    "min_pages": 2,
    "n_init": 2,
    "page_size": 4,
    "r": 6,
    "repr_topk": 2,
    "sinks": 2,
    "window": 4,
}


def _yaml(name: str) -> dict[str, Any]:
    return Entry(name, CONF / "method" / f"{name}.yaml").values()


# for tests that run the engine: those that together take every path there is
QUICK = ("adakv", "full", "h2o", "infinigen", "infllm", "kivi", "pqcache", "quest", "rkv", "shadowkv", "snapkv", "tova")
WALKED = mostly_slow(NAMES, *QUICK)
walked = pytest.mark.parametrize("name", WALKED)


def small(name: str) -> Method:
    """The method of a yaml, its windows made small."""
    values = _yaml(name)
    method: Method = build(values | {key: SMALL[key] for key in values.keys() & SMALL.keys()}, "method")
    assert method.smallest_budget <= MOST, f"add small values for {name}'s parameters to SMALL"
    return method


def in_places(*places: str) -> list[tuple[str, str]]:
    """Return every method with each of these places that it can keep rows in."""
    return [(name, place) for name in NAMES for place in places if place == "device" or small(name).offloads]


in_each_place = pytest.mark.parametrize(("name", "placement"), in_places("device", "host"))


def attach(method: Method, budget: float | None, architecture: str = "llama", placement: str = "device") -> Any:
    calibration = prompt(64, seed=9)
    return attached(tiny(architecture), method, budget=budget, placement=placement, calibration=calibration)  # type: ignore[arg-type]


LENGTH = 83  # tokens of the usual prompt: enough for what SMALL leaves
TOKENS = (
    "budget 1.0 is Full", "chunks as whole", "batch as alone", "host as device", "saved and restored", "shared prefill",
    "likelihood on as off", "questions shared as separate",
)  # fmt: skip
# whole runs and tests/methods/test_costs.py hold them as well
MOSTLY_SLOW = ("bytes as said", "likelihood on as off", "questions shared as separate")
PRESETS = {entry.name for entry in own_methods() if entry.base}  # what other methods are under other parameters
OF_PRESETS = ("runs", "budget 1.0 is Full", "budget kept", "host as device")


@cache
def trial(name: str, architecture: str = "llama") -> Trial:
    return Trial(small(name), tiny(architecture), LENGTH)


def assert_same(steps: list[Step], wanted: list[Step]) -> None:
    """The logits of all steps, and with them the tokens; a token more or less read would show in the second digit."""
    assert (where := difference(steps, wanted)) is None, where


def is_slow(name: str, check: Check) -> bool:
    if name in PRESETS:
        return check.name not in OF_PRESETS
    return check.name in MOSTLY_SLOW and name not in QUICK


def hold(check: Check, on: Trial) -> None:
    try:
        check.run(on)
    except DoesNotApply as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(
            name,
            check,
            id=f"{check.name}-{name}",
            marks=[pytest.mark.tokens] * (check.name in TOKENS) + [pytest.mark.slow] * is_slow(name, check),
        )
        for check in CHECKS
        for name in NAMES
    ],
)
@pytest.mark.filterwarnings("ignore:.* fell back on ")
def test_a_method_keeps_its_contract(name: str, check: Check) -> None:
    hold(check, trial(name))


@pytest.mark.tokens
@walked
@pytest.mark.parametrize("architecture", ["qwen3", "phi3"])
def test_a_budget_that_covers_everything_is_full_on_other_models(name: str, architecture: str) -> None:
    [check] = (check for check in CHECKS if check.name == "budget 1.0 is Full")
    hold(check, trial(name, architecture))


def test_a_method_that_keeps_all_on_the_device_refuses_other_places() -> None:
    with pytest.raises(ValueError, match="SnapKV keeps nothing on the host: use placement=device"):
        attach(SnapKV(), 0.4, placement="host").__enter__()


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_read_whole_only_below_the_least_budget(name: str) -> None:
    method = small(name)
    if not method.uses_budget or name == "kvpress":
        pytest.skip("it takes no budget, or asks its press")
    least = method.smallest_budget
    assert [method.reads_all(100, tokens) for tokens in (least - 1, least, 99, 100)] == [True, False, False, True]
