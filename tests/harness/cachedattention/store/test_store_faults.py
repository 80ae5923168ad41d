"""What goes wrong around the history store costs hits, never answers: faults are made, and counted."""

from __future__ import annotations

import gc
import json
import os
import random
import sqlite3
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from torch import Tensor

from harness.cachedattention.store import index
from harness.cachedattention.store.disk import HistoryWarning
from harness.cachedattention.store.history_store import HistoryStore
from harness.cachedattention.store.policies import LRU
from tests.forks import Forked
from tests.histories import TOKEN_BYTES, opened, right, rows
from tests.killed_history import kill_again_and_again

ROOT = Path(__file__).parents[4]
TOKENS = list(range(100, 111))  # with blocks of 4: 4, 4, 3
NAMES = [f"s{number}" for number in range(6)]


def filled(folder: Path, **settings: object) -> HistoryStore:
    store = opened(folder, **{"host": 0} | settings)
    for name in NAMES:
        store.put(name, TOKENS, rows(name, TOKENS))
    return store


def files_of(store: HistoryStore, name: str) -> list[Path]:
    assert store.contents.disk
    return [store.contents.disk.path(block) for block in store.contents.blocks[store._key(name)]]


def found(store: HistoryStore) -> list[str]:
    """The sessions that are there; none may come with rows that are not its own."""
    there = []
    for name in NAMES:
        one = store.get(name, TOKENS)
        assert right(one, name, TOKENS)
        there += [name] * bool(one.tokens)
    return there


@pytest.mark.parametrize(
    ("kills", "threads"), [(8, 0), (15, 2), *(pytest.param(100, threads, marks=pytest.mark.slow) for threads in (0, 2))]
)
def test_kills_at_random_moments_of_saving(kills: int, threads: int, tmp_path: Path) -> None:
    process = Forked(kill_again_and_again, tmp_path, 1, kills, threads)
    assert process.wait() == 0, process.err
    told = json.loads(process.out)
    assert told["kills"] == kills
    assert told["found"] == told["saved"] > kills
    assert (told["wrong"], told["orphans"], told["open_files"]) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_is_found_on_reading(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    with filled(tmp_path) as store:
        for done, name in enumerate(NAMES):
            path = rng.choice(files_of(store, name))
            data = bytearray(path.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            with pytest.warns(HistoryWarning, match=f"'{name}' is lost"):
                assert found(store) == NAMES[done + 1 :]
        assert store.statistics.lost == len(NAMES)
        assert not [path for path in tmp_path.rglob("*.safetensors")]
        store.put("s0", TOKENS, rows("s0", TOKENS))
        assert found(store) == ["s0"]


@pytest.mark.parametrize("cut", [0, 100, None])
@pytest.mark.parametrize("running", [True, False])
def test_cut_and_missing_files_are_found(cut: int | None, running: bool, tmp_path: Path) -> None:
    store = filled(tmp_path)
    path = files_of(store, "s2")[1]
    if not running:
        store.close()
    if cut is None:
        path.unlink()
    else:
        os.truncate(path, cut)
    with pytest.warns(HistoryWarning):
        names = found(store if running else (store := opened(tmp_path, host=0)))
    assert names == [name for name in NAMES if name != "s2"]
    store.close()
    assert len(list(tmp_path.rglob("*.safetensors"))) == 5 * 3


def test_no_file_of_the_index_is_mapped(tmp_path: Path) -> None:
    """One that is cut while a process has it mapped ends the process."""
    with filled(tmp_path) as store:
        assert store.get("s0", TOKENS).tokens == len(TOKENS)
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_an_index_that_finds_the_disk_full_costs_hits(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        assert store.contents.disk
        connection: sqlite3.Connection = store.contents.disk._index._connection
        (pages,) = connection.execute("pragma page_count").fetchone()
        connection.execute(f"pragma max_page_count = {pages}")
        tokens = list(range(4000))
        with pytest.warns(HistoryWarning, match="'big' is lost"):
            store.put("big", tokens, rows("big", tokens))
        assert store.get("big", tokens).tokens == 0
        assert found(store) == NAMES
        assert len(list(tmp_path.rglob("*.safetensors"))) == len(NAMES) * 3
        connection.execute("pragma max_page_count = 100000")
        store.put("big", tokens, rows("big", tokens))
        assert store.get("big", tokens).tokens == 4000


@pytest.mark.parametrize("jump_s", [-1e6, -50.0, 0.0, 1e9])
def test_a_clock_that_jumps_changes_no_order(jump_s: float, tmp_path: Path) -> None:
    """Within a process the time to live does not ask it; between two it may make all too old, none too young."""
    now = [0.0]
    times = {"clock": lambda: now[0], "ttl_s": 100.0}
    with opened(tmp_path, host=0, wall=lambda: 1e6 + (jump_s if now[0] > 10 else now[0]), **times) as store:
        for name, at in (("a", 0.0), ("b", 50.0)):  # b is used after the clock was set
            now[0] = at
            store.put(name, TOKENS, rows(name, TOKENS))
        assert [*store.placement.items] == [store._key("a"), store._key("b")]
    now[0] = 0.0
    with opened(tmp_path, host=0, wall=lambda: 1e6 + jump_s + 10, **times) as store:
        assert store.tier("b") == "disk"
        assert store.tier("a") == (None if jump_s == 1e9 else "disk")
        now[0] = 91.0
        assert store.get("b", TOKENS[:1]).tokens == 0  # expires what is too old
        assert store.tier("a") is None
        assert store.tier("b") is None
    with opened(tmp_path, host=0, wall=lambda: 0.0, **times) as store:
        assert store.tier("b") is None


def test_a_session_that_is_used_lives_on(tmp_path: Path) -> None:
    now = [0.0]
    with opened(tmp_path, clock=lambda: now[0], ttl_s=10.0) as store:
        store.put("a", TOKENS, rows("a", TOKENS))
        for now[0] in (8.0, 16.0, 24.0):
            assert store.get("a", TOKENS).tokens == 11
        now[0] = 34.5
        assert store.get("a", TOKENS).tokens == 0


def test_a_second_process_is_refused_or_waits(tmp_path: Path) -> None:
    first = filled(tmp_path)
    code = f"""
from pathlib import Path
from tests.histories import opened
folder = Path({str(tmp_path)!r})
try:
    opened(folder)
except ValueError as error:
    print(error, flush=True)
with opened(folder, wait=True) as store:
    print(store.get("s1", {TOKENS}).tokens)
"""
    second = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert second.stdout
    with second.stdout as said:
        assert "in use" in said.readline()
        first.put("s1", TOKENS[:8], rows("s1", TOKENS[:8]))
        first.close()
        assert said.read() == "8\n"
    assert second.wait() == 0


def tensors() -> int:
    gc.collect()
    return sum(type(one) is Tensor for one in gc.get_objects())


@pytest.mark.parametrize(
    ("sessions", "threads"), [(200, 2), *(pytest.param(10_000, threads, marks=pytest.mark.slow) for threads in (0, 2))]
)
def test_many_sessions_through_a_tiny_store_leave_nothing_behind(sessions: int, threads: int, tmp_path: Path) -> None:
    """Room for about 9 in memory and 27 on disk; nothing wrong, no file, tensor or descriptor more than they need."""
    rng = random.Random(0)
    known: dict[str, list[int]] = {}
    size = {"host": 100 * TOKEN_BYTES, "disk": 300 * TOKEN_BYTES, "policy": LRU()}
    hits = 0
    with opened(tmp_path, **size, io_threads=threads) as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        before, others = len(os.listdir("/proc/self/fd")), tensors()  # what other tests of this process left
        for number in range(sessions):
            name = str(number)
            known[name] = [rng.randrange(100) for _ in range(rng.randrange(4, 18))]
            store.put(name, known[name], rows(name, known[name]))
            again = str(max(0, number - int(rng.expovariate(1 / 15))))
            one = store.get(again, known[again])
            assert right(one, again, known[again])
            assert one.tokens in (0, len(known[again]))
            hits += bool(one.tokens)
        assert sessions * 0.5 < hits < sessions
        store.flush()
        assert store.contents.disk
        blocks = sum(map(len, store.contents.blocks.values()))
        assert len(store.contents.blocks) == len(store.placement.items) < 60
        assert tensors() - others < 4 * blocks + 200
        assert (
            len(list(tmp_path.rglob("*.safetensors")))
            == sum(len(e.blocks) for e in store.contents.disk.entries.values())
            < 120
        )
        assert store.contents.disk.files.bytes <= store.contents.disk.files.capacity
        assert all(tier.bytes <= tier.capacity for tier in store.placement.levels)
        assert all(len(tier._heap) < 2 * 60 + 65 for tier in store.placement.levels)
        assert len(os.listdir("/proc/self/fd")) <= before
    assert (tmp_path / index.NAME).stat().st_size < 200_000
