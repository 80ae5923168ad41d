"""Rows that come while the model computes: the same tokens and traffic as without, and as much hidden as can be."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from harness import Engine, RunningBatch, attached
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.engine.footprint import footprint
from methods.base import Method
from methods.kivi import Kivi
from methods.tiers.rows import DeviceRows, DiskRows, HostRows
from methods.tiers.transfer import TransferEngine
from tests.fast import PQ
from tests.methods.test_contract import NAMES, small
from tests.quick import every
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


# Whatever comes in whatever order, and however late rows arrive: tokens are those of rows that nobody brings ahead.

ROOM, MOST, SLOTS = 700, 560, 3
CASES = {name: small(name) for name in OFFLOADING} | {
    "pqcache with blocks": PQ.__class__(b=4, iterations=3, sinks=4, cache_tokens=32, cache_block=8, cache_offered=2)
}
# The quick tests, every second, take hosts and disks in turn.
PLACES = cycle((("host", "disk"), ("disk", "host")))
PLACED = [(name, place) for name, places in zip(CASES, PLACES, strict=False) for place in places]


class Late:
    """Rows that move take a while, and memory that they will lie in holds NaN until then."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.draw = Random(seed)
        for kind in (HostRows, DiskRows):
            monkeypatch.setattr(kind, "_send", self._slow(kind._send))
        for kind in (DeviceRows, HostRows):
            monkeypatch.setattr(kind, "room", classmethod(self._poisoned(vars(kind)["room"].__func__)))

    def _poisoned(self, room: Any) -> Any:
        def filled(kind: Any, *given: Any) -> torch.Tensor:
            rows: torch.Tensor = room(kind, *given)
            return rows.fill_(float("nan")) if rows.is_floating_point() else rows

        return filled

    def _slow(self, send: Any) -> Any:
        def late(rows: Any, x: torch.Tensor, *more: Any) -> torch.Tensor:
            if self.draw.random() < 0.2:
                time.sleep(0.001 * self.draw.random())
            return send(rows, x, *more)  # type: ignore[no-any-return]

        return late


def talks(kv: Attachment, seed: int, steps: int) -> list[list[int]]:
    """Prompts, further turns, steps of those that run together, sequences that leave and are let go: the tokens of
    every answer."""
    draw, engine = Random(seed), Engine(kv)
    batch, resting, said = RunningBatch(engine), list[KVCache](), list[list[int]]()
    for _ in range(steps):
        action = draw.random()
        if not batch.sequences or (len(batch.sequences) < SLOTS and action < 0.12):
            again = bool(resting) and draw.random() < 0.6
            ids = prompt(draw.randrange(5, 30) if again else draw.randrange(40, 90), seed=draw.randrange(10**6))
            cache = resting.pop(draw.randrange(len(resting))) if again else kv.start(KVCache, capacity=ROOM)
            cache.open_turn()
            logits = engine.prefill(cache, ids, whole=True)
            batch.join(cache, logits, ids[:, :0], began=0.0, max_new_tokens=ROOM)
        elif action < 0.25 or any(slot.cache.num_tokens > MOST for slot in batch.sequences):
            slot = max(batch.sequences, key=lambda slot: slot.cache.num_tokens)
            said.append(batch.leave(slot).tokens[0])
            if slot.cache.num_tokens < MOST - 60 and draw.random() < 0.7:
                resting.append(slot.cache)
        else:
            batch.step()
    return [*said, *(batch.leave(slot).tokens[0] for slot in list(batch.sequences))]


def all_rows() -> list[Any]:
    # isinstance would ask what a weak proxy stands for, which may be gone
    return [held for held in gc.get_objects() if issubclass(type(held), (DeviceRows, HostRows, DiskRows))]


def check(name: str, placement: str, steps: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(CASES[name], placement, False, folder) as kv:
        plain = talks(kv, steps, steps)
    assert sum(map(len, plain)) > steps // 2
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        Late(steps, patch)
        with attach(CASES[name], placement, True, folder) as kv:
            beside = talks(kv, steps, steps)
    assert set(threading.enumerate()) <= before
    assert beside == plain
    gc.collect()
    assert not list(folder.glob("*"))


@pytest.mark.tokens
@pytest.mark.parametrize("steps", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", every(2, PLACED), ids=" ".join)
def test_random_steps_give_the_tokens_of_rows_that_nobody_brings_ahead(
    case: tuple[str, str], steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(*case, steps, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_caches_dropped_in_flight_leave_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file nor a thread, and no byte: not in a prompt, nor behind the seal, nor in a step."""
    Late(3, monkeypatch)
    others, before = {id(rows) for rows in all_rows()}, set(threading.enumerate())
    with attach(CASES[name], "disk", True, tmp_path) as kv, torch.inference_mode():
        engine = Engine(kv)
        for number in range(200 // len(CASES) + 1):
            cache = kv.start(KVCache, capacity=80)
            engine.prefill(cache, prompt(50, seed=number), whole=number % 3 > 0)
            if number % 3:
                cache.seal()
            if number % 3 == 2:
                engine.run(prompt(1), cache)
            assert sum(footprint(cache.layers).values()) > 0
            del cache
    assert set(threading.enumerate()) <= before
    gc.collect()
    assert not [rows for rows in all_rows() if id(rows) not in others]
    assert not list(tmp_path.glob("*"))
