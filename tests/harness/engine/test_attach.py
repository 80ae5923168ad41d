"""What `attached` is given: a model's user says what is meant, and nothing reads everything unsaid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.engine.attach import Attachment, attached
from methods.base import BudgetError, CacheState, Request
from methods.full import Full
from methods.snapkv import SnapKV
from tests.fast import PQ, niah, run
from tests.methods.test_contract import NAMES, small
from tests.tiny import prompt, tiny

BUDGETED = [name for name in NAMES if small(name).uses_budget]


@pytest.mark.parametrize("name", BUDGETED)
def test_a_method_with_a_budget_is_given_one(name: str) -> None:
    """Without one it would read everything, as Full does."""
    method, model = small(name), tiny("llama")
    wanted = f"{type(method).__name__} was given no budget: set budget=0.2 .* or budget=1.0 for all of it"
    with pytest.raises(BudgetError, match=wanted), attached(model, method, calibration=prompt(64)):
        pass
    specs = Attachment(model, Full()).specs
    request = Request(batch=1, capacity=80, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(BudgetError, match=wanted):
        method.start(specs, CacheState(request))


def test_methods_without_a_budget_need_none() -> None:
    for name in sorted({*NAMES} - {*BUDGETED}):
        with attached(tiny("llama"), small(name)) as kv:
            assert kv.budget is None


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("snapkv", "'snapkv' is no method: pass an instance of a method, as SnapKV()."),
        (SnapKV, "SnapKV is a class: pass an instance of a method, as SnapKV()."),
        (None, "None is no method: pass an instance of a method, as SnapKV()."),
    ],
)
def test_what_is_no_method_is_refused_in_a_sentence(tmp_path: Path, method: Any, says: str) -> None:
    wanted = f"^{re.escape(says)}$"
    with pytest.raises(ValueError, match=wanted), attached(tiny("llama"), method, budget=0.2):
        pass
    with pytest.raises(ValueError, match=wanted):
        run(tmp_path, method, niah())


@pytest.mark.parametrize("method", [SnapKV(), Full()])
@pytest.mark.parametrize(("budget", "shown"), [("0.2", "'0.2'"), (True, "True"), ([0.2], r"\[0.2\]"), (2.0, "2.0")])
def test_a_budget_of_another_kind_is_refused_in_a_sentence(method: Any, budget: Any, shown: str) -> None:
    wanted = f"budget={shown} is neither a share of the prompt .* nor a number of tokens"
    with pytest.raises(BudgetError, match=wanted), attached(tiny("llama"), method, budget=budget):
        pass


def test_a_run_without_a_budget_is_refused_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.models.random.Random.build", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match=r"budget=null.*budget_bytes"):
        run(tmp_path, PQ, niah(), budget=None)
