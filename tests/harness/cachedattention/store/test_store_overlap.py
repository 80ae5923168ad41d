"""What a store does beside the model's work: it writes behind, reads ahead, and hands over layer by layer."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cachedattention.store import block as blocks
from harness.cachedattention.store import index
from harness.cachedattention.store.block import BlockFile, HistoryLost
from harness.cachedattention.store.disk import HistoryWarning
from harness.cachedattention.store.history_store import HistoryStore
from harness.cachedattention.store.lanes import WriteBuffer
from harness.cachedattention.store.policies import LRU
from harness.cachedattention.store.statistics import MeasuredSpeeds
from methods.tiers.rows import Place
from methods.tiers.transfer import TransferEngine
from tests.histories import LAYERS, TOKEN_BYTES, opened, right, rows

TOKENS = list(range(100, 111))  # with blocks of 4: 4, 4, 3
SIZE = len(TOKENS) * TOKEN_BYTES
THREADS = {"io_threads": 2}


def put(store: HistoryStore, *names: str) -> None:
    for name in names:
        store.put(name, TOKENS, rows(name, TOKENS))


@contextmanager
def second_layer_held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Its rows are not read before the event is set."""
    go, read = threading.Event(), BlockFile.read

    def waits(file: BlockFile, names: list[str], place: Place) -> Any:
        assert "1.k" not in names or go.wait(600)
        return read(file, names, place)

    monkeypatch.setattr(BlockFile, "read", waits)
    try:
        yield go
    finally:
        go.set()


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> Iterator[threading.Event]:
    """Calls wait until the event is set, as it is at the end."""
    go, action = threading.Event(), getattr(where, name)

    def waits(*args: Any, **named: Any) -> Any:
        assert go.wait(600)
        return action(*args, **named)

    monkeypatch.setattr(where, name, waits)
    try:
        yield go
    finally:
        go.set()


def in_memory(store: HistoryStore, name: str) -> bool:
    return any(block.rows is not None for block in store.contents.blocks[store._key(name)])


def test_what_waits_to_be_written_is_read_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, host=0, **THREADS) as store:
        with held_back(monkeypatch, os, "fsync"):
            put(store, "a", "b")
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


@pytest.mark.parametrize("buffer", [0, SIZE, 2 * SIZE, 3 * SIZE])
def test_a_full_write_buffer_makes_save_wait(buffer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        opened(tmp_path, host=0, write_buffer=buffer, **THREADS) as store,
        held_back(monkeypatch, os, "fsync") as go,
    ):
        wait = WriteBuffer._wait

        def let_go(saving: WriteBuffer) -> None:
            go.set()
            wait(saving)
            go.clear()

        monkeypatch.setattr(WriteBuffer, "_wait", let_go)
        for name in "abc":
            put(store, name)
            assert store.contents.saving.held <= buffer
        assert bool(store.statistics.write_waits) == bool(store.statistics.write_wait_s) == (buffer < 3 * SIZE)
        go.set()


def test_close_writes_all_that_waits(tmp_path: Path) -> None:
    names = [f"s{number}" for number in range(20)]
    with opened(tmp_path, host=5 * SIZE, **THREADS) as store:
        put(store, *names)
    with opened(tmp_path, host=0) as store:
        assert all(right(store.get(name, TOKENS), name, TOKENS) for name in names)
        assert store.statistics.reused_tokens == 20 * 11


def test_prefetching_runs_ahead_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, host=2 * SIZE, **THREADS) as store:
        put(store, "a", "b", "c", "d")
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
    sizes = {"host": 40 * TOKEN_BYTES, "disk": 150 * TOKEN_BYTES, "policy": LRU()}
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
                assert all(torch.equal(one, expected[key]) for key, one in loading.all_layers()[0].items())
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
    with opened(tmp_path, host=0, **THREADS) as store, second_layer_held_back(monkeypatch) as go:
        put(store, "a")
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


def noted_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by the name of each tensor that is read from a block's file."""
    taken, read = list[str](), BlockFile.read

    def noting(file: BlockFile, names: list[str], place: Place) -> Any:
        taken.extend(names)
        return read(file, names, place)

    monkeypatch.setattr(BlockFile, "read", noting)
    return taken


@pytest.mark.parametrize("threads", [0, 2])
def test_the_read_buffer_bounds_what_is_read_ahead(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = noted_reads(monkeypatch)
    with opened(tmp_path, host=0, io_threads=threads) as store:
        put(store, "a", "b")
        store.flush()
        loading = store.open("a", TOKENS, 1)
        assert loading is not None
        assert loading.fetch.rows(0).result()
        store.flush()
        assert {name[0] for name in taken} == {"0"}
        loading.begin()
        assert loading.all_layers()[0].keys() == rows("a", TOKENS).keys()
        assert len(taken) == 2 * LAYERS * 3  # of each of three blocks once


@pytest.mark.parametrize("threads", [0, 2])
def test_what_was_cancelled_is_read_no_further_and_others_have_all(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = noted_reads(monkeypatch)
    with opened(tmp_path, host=0, io_threads=threads) as store:
        put(store, "a", "b")
        store.flush()
        for _ in range(2):
            loading = store.open("a", TOKENS, 1)
            assert loading is not None
            loading.fetch.rows(0).result()
            loading.cancel()
            loading.cancel()
        assert not store.contents.fetches
        store.flush()
        assert {name[0] for name in taken} == {"0"}
        assert store.statistics.read_bytes == 2 * SIZE // LAYERS
        first, other = store.open("a", TOKENS, 1), store.open("a", TOKENS, 1)
        assert first is not None
        assert other is not None
        assert first.fetch is other.fetch
        first.cancel()
        assert other.all_layers()[0].keys() == rows("a", TOKENS).keys()


def test_a_store_shares_the_engine_of_its_device(tmp_path: Path) -> None:
    """Its rows go to the device in the engine's own lane, and the engine's end drains all of the store's."""
    engine = TransferEngine(threads=1)
    with opened(tmp_path, host=0, engine=engine, **THREADS) as store:
        assert store.contents.lanes.copying is engine.copy_lane
        put(store, "a")
        engine.close()
        found = store.get("a", TOKENS)  # the caller does it now
        assert found.layers.keys() == rows("a", TOKENS).keys()


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("then", ["put", "extend", "truncate", "prefetch", "open", "close"])
def test_what_was_opened_and_never_begun_holds_up_nothing(then: str, threads: int, tmp_path: Path) -> None:
    with opened(tmp_path, host=0 if then != "prefetch" else SIZE, io_threads=threads) as store:
        put(store, "a", "b")  # b takes the place of a in memory, where there is one
        store.flush()
        loading = store.open("a", TOKENS, 1)
        assert loading is not None
        if then == "put":
            put(store, "a")
        elif then == "extend":
            assert store.extend("a", 11, [5], rows("a", [5], 11))
        elif then == "truncate":
            store.truncate("a", 0.0)
        elif then == "prefetch":
            store.enqueue("a")
            store.prefetch()
        if then != "close":
            store.flush()
            assert (then == "truncate") == (store.open("a", TOKENS) is None)
            loading.begin()  # after all, from what was read
            assert loading.all_layers()[0].keys() == rows("a", TOKENS).keys()


def test_the_default_buffer_is_what_the_prefill_cannot_hide() -> None:
    speeds = MeasuredSpeeds()
    assert speeds.read_buffer("host", 1000, 10, 5) == 10
    speeds.loaded("host", 4000, 2.0)
    assert speeds.read_buffer("host", 1000, 10, 5) == 10
    speeds.prefilled(100, 5.0)
    assert (speeds.bandwidth("host"), speeds.prefill(), speeds.bandwidth("disk")) == (2000.0, 0.05, None)
    # S_buf = B (T_load L_hist - T_pref L_new) = 1000 - 2000 * 0.05 * new
    assert [speeds.read_buffer("host", 1000, 10, new) for new in (0, 1, 5, 8, 10, 50)] == [10, 9, 5, 2, 0, 0]
    assert speeds.read_buffer("disk", 1000, 10, 5) == 10


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_damage_that_is_found_in_the_midst_of_a_job_ends_its_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, host=0, **THREADS) as store, second_layer_held_back(monkeypatch) as go:
        put(store, "a", "b")
        store.flush()
        assert store.contents.disk
        path = store.contents.disk.path(store.contents.blocks[store._key("a")][1])
        flip(path, path.stat().st_size - 1)  # of the last layer
        loading = store.open("a", TOKENS)
        assert loading is not None
        assert loading.layer(0)[0].keys() == {"0.k", "0.v"}
        go.set()
        with (
            pytest.warns(HistoryWarning, match="'a' is lost"),
            pytest.raises(HistoryLost),
        ):
            loading.layer(1)
        assert (store.tier("a"), store.statistics.lost, store.statistics.reused_tokens) == (None, 1, 0)
        assert right(store.get("b", TOKENS), "b", TOKENS)
        store.flush()
        assert len(list(tmp_path.rglob("*.safetensors"))) == 3


def test_missing_and_foreign_files_are_found_before_anything_is_promised(tmp_path: Path) -> None:
    with opened(tmp_path, host=0, **THREADS) as store:
        put(store, "a", "b")
        store.flush()
        assert store.contents.disk
        paths = {name: store.contents.disk.path(store.contents.blocks[store._key(name)][0]) for name in "ab"}
        paths["a"].unlink()
        flip(paths["b"], 12)  # in its head
        for name in "ab":
            with pytest.warns(HistoryWarning, match=f"'{name}' is lost"):
                assert store.open(name, TOKENS) is None
        assert store.statistics.hits.total() == 0


def test_a_prefetched_session_that_is_damaged_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, host=SIZE, **THREADS) as store, held_back(monkeypatch, BlockFile, "read") as go:
        put(store, "a", "b")
        store.flush()
        flip(next(tmp_path.rglob("*.safetensors")), -1)
        store.enqueue("a")
        store.prefetch()
        go.set()
        with pytest.warns(HistoryWarning, match="'a' is lost"):
            store.flush()
        assert store.get("a", TOKENS).tokens == 0


def test_a_store_of_another_format_is_dropped_and_says_so(tmp_path: Path) -> None:
    with opened(tmp_path, host=0) as store:
        put(store, "a")
    connection = sqlite3.connect(tmp_path / index.NAME)
    connection.execute("pragma user_version = 1")
    connection.close()
    with pytest.warns(HistoryWarning, match="format 1"):
        store = opened(tmp_path)
    assert store.get("a", TOKENS).tokens == 0
    store.close()


@pytest.mark.parametrize("dtype", [*blocks.DTYPES.values()], ids=str)
def test_every_dtype_is_read_as_it_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    given = torch.arange(24).view(2, 3, 4).to(dtype)
    with opened(tmp_path, host=0) as store:
        store.put("a", [1, 2, 3], {"0.k": given})
        assert store.get("a", [1, 2, 3]).layers["0.k"].view(torch.uint8).equal(given.view(torch.uint8))
