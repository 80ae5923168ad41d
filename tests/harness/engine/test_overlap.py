"""Rows that come while the model computes: the same tokens and traffic as without, and as much hidden as can be."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.engine.attach import Attachment, attached
from harness.engine.engine import Engine
from methods.base import Method
from methods.kivi import Kivi
from methods.tiers.transfer import TransferEngine
from tests.methods.test_contract import NAMES, small
from tests.tiny import prompt, tiny

OFFLOADING = [name for name in NAMES if small(name).offloads]


def attach(name: str | Method, placement: str, overlap: bool, disk: Path | None = None) -> Any:
    method = small(name) if isinstance(name, str) else name
    if isinstance(method, Kivi):
        method = replace(method, group=16, residual=32)  # so short a prompt has codes
    return attached(
        tiny("llama"), method, budget=0.4 if method.uses_budget else None, placement=placement,
        calibration=prompt(64, seed=9), disk=disk, overlap=overlap,
    )  # fmt: skip


def answers(kv: Attachment, turns: int = 2) -> list[tuple[list[list[int]], float, dict[str, int]]]:
    """What two prompts and a further turn of the second give: tokens, bytes that a step moves, bytes by tier."""
    engine, seen = Engine(kv), []
    for length in (60, 83):
        out = engine.generate(prompt(length, seed=length), max_new_tokens=7)
        seen.append((out.tokens, out.measured["moved_bytes_per_step"], out.kv))
    return seen


@pytest.mark.tokens
@pytest.mark.parametrize("placement", ["host", "disk"])
@pytest.mark.parametrize("name", OFFLOADING)
def test_tokens_and_traffic_are_those_without_overlap(name: str, placement: str, tmp_path: Path) -> None:
    with attach(name, placement, overlap=False, disk=tmp_path) as kv:
        plain = answers(kv)
    before = set(threading.enumerate())
    with attach(name, placement, overlap=True, disk=tmp_path) as kv:
        beside = answers(kv)
    assert set(threading.enumerate()) <= before
    assert [one[:2] for one in beside] == [one[:2] for one in plain]
    gc.collect()
    assert not list(tmp_path.glob("*"))


@pytest.mark.parametrize(("placement", "staged"), [("disk", 1), ("host", 0)])
def test_what_is_on_its_way_counts_as_device_memory(placement: str, staged: int, tmp_path: Path) -> None:
    """Behind the last step the first layer's prompt has come for the next one: beside a CPU, that of the host is a view
    of what lies there."""
    with attach("full_offloaded", placement, overlap=False, disk=tmp_path) as kv:
        ((_, _, plain), *_) = answers(kv)
    with attach("full_offloaded", placement, overlap=True, disk=tmp_path) as kv:
        kv.engine = TransferEngine()  # rows come when they are asked for, and not when a thread gets to it
        ((_, _, beside), *_) = answers(kv)
    spec = kv.specs[0]
    assert beside[placement] == plain[placement]
    assert beside["device"] - plain["device"] == staged * 2 * 60 * spec.num_kv_heads * spec.head_dim * 4
