"""The history store: what it gives back, where sessions lie, and that it places them as the simulator says."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cachedattention.store import block as blocks
from harness.cachedattention.store.block import BlockFile
from harness.cachedattention.store.disk import HistoryError
from harness.cachedattention.store.fingerprint import EXACT
from harness.cachedattention.store.placement import POLICIES
from harness.cachedattention.store.statistics import MeasuredSpeeds
from tests.histories import LAYERS, PRINT, TOKEN_BYTES, WholeStore, opened, right, rows

TOKENS = list(range(100, 111))  # with blocks of 4: 4, 4, 3


def filled(store: WholeStore, *sessions: str) -> WholeStore:
    for session in sessions:
        store.put(session, TOKENS, rows(session, TOKENS))
    return store


@pytest.mark.parametrize("tiers", [{}, {"host": 0}, {"disk": 0}])
def test_the_longest_prefix_in_blocks_with_its_rows(tiers: dict[str, int], tmp_path: Path) -> None:
    folder = tmp_path if tiers.get("disk", 1) else None
    with filled(opened(folder, **tiers), "a") as store:
        for asked, expected in (
            (TOKENS, 11),
            ([*TOKENS, 5, 6], 11),
            (TOKENS[:10], 8),
            ([*TOKENS[:7], 0, *TOKENS[8:]], 4),
            ([0, *TOKENS[1:]], 0),
            ([], 0),
        ):
            found = store.get("a", asked)
            assert found.tokens == expected
            assert right(found, "a", asked)
            assert (found.tier is None) == (not expected)
        assert store.get("b", TOKENS).tokens == 0
        told = json.loads(json.dumps(store.statistics.plain()))
        assert sum(told["hits"].values()) == store.statistics.hits.total() == 4
        assert told["reused_tokens"] == 11 + 11 + 8 + 4
        assert store.statistics.lookups == 7


@pytest.mark.parametrize("by_token", [True, False])
def test_a_rest_comes_back_with_the_whole_session_or_not_at_all(by_token: bool, tmp_path: Path) -> None:
    given, rest = rows("a", TOKENS) if by_token else {}, {"sums": torch.arange(5.0), "seen": torch.tensor(11)}
    with opened(tmp_path) as store:
        store.put("a", TOKENS, given, rest)
    with opened(tmp_path) as store:
        assert store.get("a", TOKENS[:10]).tier is None
        assert store.get("a", [*TOKENS[:10], 0]).tier is None
        for tier in ("disk", "host"):
            found = store.get("a", [*TOKENS, 5])
            assert (found.tokens, found.tier) == (11, tier)
            assert found.layers.keys() == given.keys()
            assert found.rest.keys() == rest.keys()
            assert all(torch.equal(found.rest[name], x) for name, x in rest.items())
            found.rest["sums"].zero_()
        new = [1, 2, 3]
        start, more = store.known("a", [*TOKENS, *new]), {"sums": torch.ones(7)}
        assert store.extend("a", start, new, rows("a", new, 11) if by_token else {}, more)
        found = store.get("a", [*TOKENS, *new])
        assert (found.tokens, found.rest["sums"].tolist()) == (14, [1.0] * 7)
        assert right(found, "a", [*TOKENS, *new]) or not by_token
        assert store.truncate("a") == 14
        assert store.tier("a") is None
        assert [level.bytes for level in store.placement.levels] == [0, 0]


def test_rows_that_were_given_are_no_ones_but_the_stores() -> None:
    store = opened()
    given = rows("a", TOKENS)
    store.put("a", TOKENS, given)
    given["0.k"].zero_()
    found = store.get("a", TOKENS)
    assert right(found, "a", TOKENS)
    found.layers["0.k"].zero_()
    assert right(store.get("a", TOKENS), "a", TOKENS)


def test_extend_writes_new_blocks_alone(tmp_path: Path) -> None:
    with filled(opened(tmp_path, host=0), "a") as store:
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
        assert len(before) == 3
        new = [1, 2, 3, 4, 5]
        assert store.extend("a", 11, new, rows("a", new, 11))
        after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
        assert len(after) == 5
        assert before.items() <= after.items()
        assert store.statistics.written_bytes == 16 * TOKEN_BYTES
        assert right(store.get("a", [*TOKENS, *new]), "a", [*TOKENS, *new])
        assert store.get("a", [*TOKENS, *new]).tokens == 16


@pytest.mark.parametrize(("host", "tier"), [(0, "disk"), (10_000 * TOKEN_BYTES, "host")])
@pytest.mark.parametrize(("keep", "dropped"), [(0.5, 6), (0.0, 11), (1.0, 0), (7 / 11, 4)])
def test_truncation_drops_the_oldest_tokens(keep: float, dropped: int, host: int, tier: str, tmp_path: Path) -> None:
    with filled(opened(tmp_path, host=host), "a") as store:
        assert store.truncate("a", keep) == dropped
        rest = TOKENS[dropped:]
        lineage = store.lineage("a") or EXACT
        found = store.get("a", rest, lineage)
        assert found.tokens == len(rest)
        assert right(found, "a", rest, dropped)
        assert sum(level.bytes for level in store.placement.levels) == len(rest) * TOKEN_BYTES
        assert found.tier == (tier if rest else None)
        if rest:
            assert store.extend("a", len(rest), [1, 2], rows("a", [1, 2], 11), lineage=lineage)
            assert right(store.get("a", [*rest, 1, 2], lineage), "a", [*rest, 1, 2], dropped)


@pytest.mark.parametrize("host", [0, 10_000 * TOKEN_BYTES])
def test_rows_behind_a_cut_are_not_those_of_the_shorter_text(host: int, tmp_path: Path) -> None:
    """They were computed in sight of what left: only who knows of the cut finds them, in any process."""
    with filled(opened(tmp_path, host=host), "a", "b") as store:
        dropped, rest = store.truncate("a"), TOKENS[6:]
        lineage = store.lineage("a")
        assert lineage not in (None, EXACT)
        assert store.get("a", rest).tokens == 0
        assert not store.extend("a", len(rest), [1], rows("a", [1]))
        store.truncate("b", 8 / 11)
        assert store.lineage("b") not in (EXACT, lineage)  # another cut of the same text
    with opened(tmp_path, host=host) as store:
        assert store.known("a", rest) == 0
        found = store.get("a", rest, lineage)
        assert found.tokens == len(rest)
        assert right(found, "a", rest, dropped)
        store.put("a", rest, rows("a", rest))  # computed again
        assert right(store.get("a", rest), "a", rest)
    with opened(tmp_path, host=host) as store:
        assert store.get("a", rest, lineage).tokens == 0
        assert right(store.get("a", rest), "a", rest)


def test_another_model_never_matches(tmp_path: Path) -> None:
    with filled(opened(tmp_path, host=0), "a"):
        pass
    for field in ("model", "weights", "tokenizer", "rotary", "dtype", "codec"):
        other = replace(PRINT, **{field: "other"})
        with WholeStore(other, folder=tmp_path, disk=10_000 * TOKEN_BYTES, block_tokens=4) as store:
            assert store.get("a", TOKENS).tokens == 0
    with opened(tmp_path, host=0) as store:
        assert store.get("a", TOKENS).tokens == 11


def test_the_order_of_use_outlives_restarts(tmp_path: Path) -> None:
    size = {"host": 0, "disk": 33 * TOKEN_BYTES, "policy": POLICIES["lru"]}
    with filled(opened(tmp_path, **size), "a", "b", "c") as store:
        store.get("a", TOKENS)
    with opened(tmp_path, **size | {"policy": POLICIES["lru"]}) as store:
        filled(store, "d")
        store.get("c", TOKENS)
    with opened(tmp_path, **size | {"policy": POLICIES["lru"]}) as store:
        filled(store, "e")
        assert [store.tier(name) for name in "abcde"] == [None, None, "disk", "disk", "disk"]


def test_a_session_that_comes_back_unchanged_is_not_written_again(tmp_path: Path) -> None:
    with filled(opened(tmp_path, host=11 * TOKEN_BYTES, policy=POLICIES["lru"]), "a", "b") as store:
        assert (store.tier("a"), store.tier("b")) == ("disk", "host")
        for session in ("a", "b", "a", "b"):
            assert right(store.get(session, TOKENS), session, TOKENS)
        assert store.statistics.written_bytes == 22 * TOKEN_BYTES  # each once
        assert store.statistics.moved["host", "disk"] == 5 * 11 * TOKEN_BYTES


def test_rows_of_another_length_and_a_disk_without_a_place_are_errors() -> None:
    with pytest.raises(HistoryError):
        opened(None, disk=5)


@pytest.mark.parametrize("dtype", [*blocks.DTYPES.values()], ids=str)
def test_every_dtype_is_read_as_it_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    given = torch.arange(24).view(2, 3, 4).to(dtype)
    with opened(tmp_path, host=0) as store:
        store.put("a", [1, 2, 3], {"0.k": given})
        assert store.get("a", [1, 2, 3]).layers["0.k"].view(torch.uint8).equal(given.view(torch.uint8))


# What a store does beside the model's work: it writes behind, reads ahead, and hands over layer by layer.

SIZE = len(TOKENS) * TOKEN_BYTES
THREADS = {"threads": 2}


@contextmanager
def held_back(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, layer: int | None = None
) -> Iterator[threading.Event]:
    """Calls, or those that read a `layer`, wait until the event is set, as it is at the end."""
    go, action = threading.Event(), getattr(where, name)

    def waits(*args: Any, **named: Any) -> Any:
        assert (layer is not None and f"{layer}.k" not in args[1]) or go.wait(600)
        return action(*args, **named)

    monkeypatch.setattr(where, name, waits)
    try:
        yield go
    finally:
        go.set()


def in_memory(store: WholeStore, name: str) -> bool:
    return any(block.rows is not None for block in store.contents.blocks[store._key(name)])


def test_what_waits_to_be_written_is_read_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, host=0, **THREADS) as store:
        with held_back(monkeypatch, os, "fsync"):
            filled(store, "a", "b")
            store.put("a", TOKENS[:6], rows("a", TOKENS[:6]))  # replaced before it was written
            assert store.extend("a", 6, [7], rows("a", [7], 6))
            found = store.get("a", [*TOKENS[:6], 7])
            assert (found.tokens, found.tier) == (7, "disk")
            assert right(found, "a", [*TOKENS[:6], 7])
            assert right(store.get("b", TOKENS), "b", TOKENS)
            assert store.statistics.read_bytes == 0
            assert not list(tmp_path.rglob("*.safetensors"))
            assert store.contents.saving.held == 2 * SIZE + (6 + 7) * TOKEN_BYTES
        store.flush()
        assert (store.contents.saving.held, in_memory(store, "a"), in_memory(store, "b")) == (0, False, False)
        assert right(store.get("a", [*TOKENS[:6], 7]), "a", [*TOKENS[:6], 7])
        assert store.statistics.read_bytes == 7 * TOKEN_BYTES
        assert store.statistics.write_waits == 0
        assert len(list(tmp_path.rglob("*.safetensors"))) == 2 + 1 + 3


@pytest.mark.parametrize(("buffer", "waits"), [(0, True), (2 * SIZE, True), (3 * SIZE, False)])
def test_a_full_write_buffer_makes_save_wait(buffer: int, waits: bool, tmp_path: Path) -> None:
    with opened(tmp_path, host=0, write_buffer=buffer, **THREADS) as store:
        store.contents.saving._worker.submit(partial(time.sleep, 0.1))  # the disk is busy
        filled(store, "a", "b", "c")
        assert store.contents.saving.held <= buffer
        assert bool(store.statistics.write_waits) == bool(store.statistics.write_wait_s) == waits


def test_prefetching_runs_ahead_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, host=2 * SIZE, **THREADS) as store:
        filled(store, "a", "b", "c", "d")
        store.flush()
        for name in "abcd":
            store.enqueue(name)
        assert [store.tier(name) for name in "abcd"] == ["disk", "disk", "host", "host"]
        with held_back(monkeypatch, BlockFile, "read"):
            store.prefetch()
            assert [store.tier(name) for name in "abcd"] == ["host", "host", "disk", "disk"]
            assert not in_memory(store, "a")
            assert right(store.get("c", TOKENS), "c", TOKENS)  # on its way to disk, still in memory
            loading = store.open("b", TOKENS)
            assert loading is not None
            loading.begin()
            assert (loading.tier, store.statistics.hits["disk"]) == ("disk", 2)  # on its way to memory, still on disk
        store.flush()
        assert in_memory(store, "a")
        assert store.statistics.read_bytes == 2 * SIZE
        found = store.get("a", TOKENS)
        assert (found.tier, store.statistics.read_bytes) == ("host", 2 * SIZE)
        assert right(found, "a", TOKENS)


def test_what_is_fetched_may_be_evicted_extended_and_dropped(tmp_path: Path) -> None:
    """Whatever comes while a session is on its way up finds its rows."""
    rng = random.Random(0)
    known: dict[str, list[int]] = {}
    before = set(threading.enumerate())
    sizes = {"host": 40 * TOKEN_BYTES, "disk": 150 * TOKEN_BYTES, "policy": POLICIES["lru"]}
    with opened(tmp_path, **sizes, write_buffer=30 * TOKEN_BYTES, **THREADS) as store:
        for number in range(300):
            name = f"s{rng.randrange(12)}"
            tokens = known.setdefault(name, [])
            store.enqueue(name)
            if number % 3 == 0:
                store.prefetch()
            loading = store.open(name, tokens, rng.randrange(LAYERS + 1))
            store.dequeue(name)
            start = loading.tokens if loading else 0
            assert start in (0, len(tokens))
            new = [rng.randrange(500) for _ in range(rng.randrange(1, 9))]
            if loading and rng.random() < 0.5:
                store.put(f"t{number}", TOKENS, rows(f"t{number}", TOKENS))  # may drop the one that is loaded
            if loading:
                expected = rows(name, tokens)
                assert all(
                    torch.equal(x, expected[name]) for at in loading.layers for name, x in loading.layer(at)[0].items()
                )
            known[name] = [*tokens, *new] if len(tokens) < 30 else new
            if len(tokens) >= 30 or not store.extend(name, start, new, rows(name, new, start)):
                store.put(name, known[name], rows(name, known[name]))
        assert store.statistics.lost == 0
        assert store.statistics.hits["host"] > 20
        assert store.statistics.hits["disk"] > 20
        store.flush()
        assert store.contents.disk
        assert store.contents.disk.files.bytes <= store.contents.disk.files.capacity
        assert not store.contents.fetches
        for key, parts in store.contents.blocks.items():  # memory holds what lies in memory, and nothing else
            assert {block.rows is None for block in parts} == {store.placement.tier(key) == "disk"}
    assert set(threading.enumerate()) <= before


def test_a_layer_is_there_before_the_next_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, host=0, **THREADS) as store, held_back(monkeypatch, BlockFile, "read", layer=1) as go:
        filled(store, "a")
        store.flush()
        loading = store.open("a", [*TOKENS, 5])
        assert loading is not None
        assert (loading.tokens, loading.tier, loading.new) == (11, "disk", 1)
        expected = rows("a", TOKENS)
        first, rest = loading.layer(0)
        assert rest == {}
        assert {name: one.tolist() for name, one in first.items()} == {
            name: expected[name].tolist() for name in ("0.k", "0.v")
        }
        go.set()
        assert torch.equal(loading.layer(1)[0]["1.v"], expected["1.v"])
        overlap = loading.finish()
        assert overlap.exposed_s > 0
        assert overlap.hidden_s <= overlap.load_s
        assert store.statistics.load_s == overlap.load_s


def test_the_default_buffer_is_what_the_prefill_cannot_hide() -> None:
    speeds = MeasuredSpeeds()
    assert speeds.read_buffer("host", 1000, 10, 5) == 10
    speeds.loaded("host", 4000, 2.0)
    assert speeds.read_buffer("host", 1000, 10, 5) == 10
    speeds.prefilled(100, 5.0)
    # S_buf = B (T_load L_hist - T_pref L_new) = 1000 - 2000 * 0.05 * new
    assert [speeds.read_buffer("host", 1000, 10, new) for new in (0, 1, 5, 8, 10, 50)] == [10, 9, 5, 2, 0, 0]
    assert speeds.read_buffer("disk", 1000, 10, 5) == 10
