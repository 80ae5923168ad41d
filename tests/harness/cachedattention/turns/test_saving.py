"""Rows leave the device while the turn decodes and while the next job runs; nothing but the time is another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cachedattention.store.disk import HistoryWarning
from harness.cachedattention.store.upload import UploadToHost
from harness.cachedattention.turns.stored import StoredCaches
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.footprint import footprint
from methods.base import AttnInput
from methods.full import Full
from methods.tiers.codec import IntCodec
from tests.harness.cachedattention.turns.test_caches import CAPACITY, LENGTHS, MB, NEW, TIERS, Talk, lasting, stored
from tests.methods.test_contract import attach, small
from tests.tiny import prompt, tiny

HERE = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="no CUDA device on this machine")]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])


LAST = 5  # copies of a layer, from 0: of the first turn's prompt, then of the others' rows
TAIL_BYTES = (LENGTHS[0] % 8 + NEW - 1) * 2 * 2 * 16 * 4  # of a layer in the second: keys and values, 2 heads of 16


def counted(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    """Call `action` before the layer of that number leaves the device, counted through all turns."""
    calls, copies = count(), UploadToHost._layer

    def counting(upload: UploadToHost, layer: int, rows: Any, rest: Any) -> Any:
        if next(calls) == number:
            copied = upload._copied
            monkeypatch.setattr(upload, "_copied", lambda *given: action() or copied(*given))  # type: ignore[func-returns-value]
        return copies(upload, layer, rows, rest)

    monkeypatch.setattr(UploadToHost, "_layer", counting)


def saved_one_turn(talk: Talk) -> None:
    talk.turns(LENGTHS[:1])
    assert isinstance(talk.caches, StoredCaches)
    talk.caches.store.flush()


@pytest.mark.tokens
def test_a_turn_begins_while_the_one_before_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last layer waits for the last one saved, and for no other."""
    go, attend = threading.Event(), KVCache.attend
    counted(monkeypatch, LAST, lambda: None if go.wait(600) else pytest.fail("the next turn waits"))
    with attach(Full(), None) as kv:
        wanted, talk = lasting(kv), Talk(kv, stored(kv, host=9 * MB))
        histories: Any = talk.caches
        talk.turns(LENGTHS[:1])
        assert histories.store.tier("alice") == "host"
        assert histories.store.contents.leaving.held >= TAIL_BYTES

        def noting(cache: KVCache, layer: int, x: AttnInput) -> torch.Tensor:
            out = attend(cache, layer, x)
            go.set()  # once its first layer is computed
            return out

        monkeypatch.setattr(KVCache, "attend", noting)
        talk.turns(LENGTHS[1:])
        assert talk.said == wanted.said
        assert [found.reused for found in talk.found] == [found.reused for found in wanted.found]


@pytest.mark.tokens
@pytest.mark.parametrize(("name", "failing", "tier"), [("full", 1, "host"), ("full", 4, "disk"), ("snapkv", 2, "host")])
def test_an_error_of_the_thread_costs_the_hit(
    name: str, failing: int, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`failing`: the layer, counted through all that leave; 4 is one of the answer's."""
    with attach(small(name), 0.4) as kv:
        wanted = lasting(kv)
        talk = Talk(kv, stored(kv, tmp_path if tier == "disk" else None, **TIERS[tier]))
        histories: Any = talk.caches

        def fails() -> None:
            raise RuntimeError("CUDA error: out of memory")

        counted(monkeypatch, failing, fails)
        with pytest.warns(HistoryWarning, match="alice"):
            saved_one_turn(talk)
        assert histories.store.tier("alice") is None
        assert histories.store.statistics.lost == 1
        talk.turns(LENGTHS[1:])
        assert [found.tier for found in talk.found] == [None, None, tier, tier]
        if name == "full":  # what evicts keeps other tokens when it computes again
            assert talk.said == wanted.said
        histories.close()
        assert not list(tmp_path.rglob(".*.safetensors.*"))


@pytest.mark.tokens
@devices
@pytest.mark.parametrize(("name", "placement"), [("full", "device"), ("pqcache", "host"), ("h2o", "device")])
def test_a_device_changes_no_token(name: str, placement: str, device: str) -> None:
    model: Any = deepcopy(tiny("llama")).to(device)  # type: ignore[arg-type]
    with attached(model, small(name), budget=0.4, placement=placement, calibration=prompt(64, seed=9)) as kv:
        assert Talk(kv, stored(kv, host=9 * MB, on=device)).turns().said == lasting(kv).said


# Rows that lie off the device go into a store and come back without crossing it, as they are written.

INT4 = IntCodec(bits=4, group=16)
# methods whose rows a store keeps token by token, and those whose whole state it keeps
BY_TOKEN = ("full", "pqcache", "quest", "sparq")
WHOLE = ("infinigen", "infllm", "kivi", "rocketkv", "shadowkv")
CODED = ("pqcache", "infllm")
CHANGES = {"full": {"offload": True}, "kivi": {"group": 8, "residual": 16}}  # so that something lies away


@dataclass
class Fed:
    """A conversation's first turn, answered and not yet saved."""

    cache: KVCache
    tokens: list[int]


def attach_to(name: str, placement: str = "host", **how: Any) -> Any:
    method: Any = replace(small(name), **CHANGES.get(name, {}))  # type: ignore[type-var]
    return attached(tiny("llama"), method, budget=0.4, placement=placement, calibration=prompt(64, seed=9), **how)


@torch.inference_mode()
def fed(kv: Attachment) -> Fed:
    engine, ids = Engine(kv), prompt(LENGTHS[0])
    cache = kv.start(KVCache, capacity=CAPACITY)
    made = engine.complete(cache, engine.prefill(cache, ids), ids[:, :0], began=0.0, max_new_tokens=NEW)
    return Fed(cache, [*ids[0].tolist(), *made.tokens[0][:-1]])


def crossed(cache: KVCache) -> int:
    """Bytes that went to the device or came from it so far."""
    return cache.traffic.total_bytes


@pytest.mark.parametrize("placement", ["host", "disk"])
@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, {}) for name in (*BY_TOKEN, *WHOLE)), *((name, {"codec": INT4}) for name in CODED)],
    ids=lambda value: value if isinstance(value, str) else "int4" if value else "plain",
)
def test_saving_moves_nothing_to_the_device(name: str, how: dict[str, Any], placement: str, tmp_path: Path) -> None:
    with attach_to(name, placement, disk=tmp_path, **how) as kv:
        histories, turn = stored(kv, host=9 * MB), fed(kv)
        before, held = crossed(turn.cache), footprint(turn.cache.layers)
        assert held[placement] > 0
        histories.save("alice", turn.tokens, turn.cache)
        histories.store.flush()
        assert crossed(turn.cache) == before
        assert footprint(turn.cache.layers) == held  # nothing came back to stay
        histories.close()
