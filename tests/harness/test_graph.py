"""Decode steps that are recorded once and repeated give what steps give that are run one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.attach import Attachment
from harness.engine import Engine, Generation
from kernels.dispatch import use_backend
from methods.base import Method
from methods.budget import Budget
from tests.methods.test_contract import NAMES, attach, small
from tests.recorder import Tape
from tests.tiny import prompt

PLAIN = {  # methods whose steps cannot be recorded, and part of the reason that they give
    "infinigen": "the text decides",
    "infllm": "its window moves",
}


def repeatable(name: str) -> Method:
    method = small(name)
    return replace(method, hit_cache=False) if name == "shadowkv" else method  # type: ignore[call-arg]


def generate(kv: Attachment, ids: Tensor, recorded: bool, **how: Any) -> tuple[Generation, Engine]:
    engine = Engine(kv, recorder=Tape() if recorded else None)
    with use_backend("torch"):
        return engine.generate(ids, max_new_tokens=9, **how), engine


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("context", [None, 74])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in PLAIN])
def test_repeated_steps_are_the_same(name: str, context: int | None, batch: int) -> None:
    ids = prompt(80, batch=batch)
    with attach(repeatable(name), 0.5) as kv:
        wanted, _ = generate(kv, ids, False, context_tokens=context)
        got, engine = generate(kv, ids, True, context_tokens=context)
    assert engine.plain_steps is None
    assert got.graph_s is not None
    assert got.tokens == wanted.tokens
    for key in ("stops", "attended_prompt", "attended_total", "moved_bytes_per_step", "kv", "sealed"):
        assert getattr(got, key) == getattr(wanted, key), key
