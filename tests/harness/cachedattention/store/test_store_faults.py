"""What goes wrong around the history store costs hits, never answers: kills, damaged files, full disks, a folder that
goes away. What is found is what was stored."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.cachedattention.store import block as blocks
from harness.cachedattention.store.disk import HistoryError, HistoryWarning
from kernels.temporary import ENDING
from tests.forks import Forked
from tests.histories import TOKEN_BYTES, WholeStore, opened, right, rows
from tests.killed_history import kill_again_and_again
from tests.warned import all_warnings

TOKENS = list(range(100, 111))  # with blocks of 4: 4, 4, 3
NAMES = [f"s{number}" for number in range(6)]
Fault = Callable[[int], bool]  # the number of a write -> whether it finds the disk full
lossy = pytest.mark.filterwarnings("ignore::harness.cachedattention.store.disk.HistoryWarning")


def filled(folder: Path, **settings: object) -> WholeStore:
    store = opened(folder, **{"host": 0} | settings)
    for name in NAMES:
        store.put(name, TOKENS, rows(name, TOKENS))
    return store


def files_of(store: WholeStore, name: str) -> list[Path]:
    assert store.contents.disk
    return [store.contents.disk.path(block) for block in store.contents.blocks[store._key(name)]]


def found(store: WholeStore) -> list[str]:
    """The sessions that are there; none may come with rows that are not its own."""
    histories = {name: store.get(name, TOKENS) for name in NAMES}
    assert all(right(history, name, TOKENS) for name, history in histories.items())
    return [name for name, history in histories.items() if history.tokens]


def flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 8)) if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: rng.choice((0, rng.randrange(len(data) + 1)))])


def delete(file: Path, rng: random.Random) -> None:
    file.unlink()


def garbage(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.randbytes(rng.randrange(1, 5000)))


DAMAGES = (flip, cut, delete, garbage)


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


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_costs_its_session_alone(damage: Callable[[Path, random.Random], None], tmp_path: Path) -> None:
    rng = random.Random(1)
    with filled(tmp_path) as store:
        for done, name in enumerate(NAMES[:3]):
            damage(rng.choice(files_of(store, name)), rng)
            with pytest.warns(HistoryWarning, match=name):
                assert found(store) == NAMES[done + 1 :]
        assert store.statistics.lost == 3
        assert len(list(tmp_path.rglob("*.safetensors"))) == 3 * 3
        store.put("s0", TOKENS, rows("s0", TOKENS))
    for file in (next((tmp_path / "sessions").iterdir()), next((tmp_path / "blocks").rglob("*.safetensors"))):
        damage(file, rng)
    with all_warnings(), opened(tmp_path, host=0) as store:
        assert len(found(store)) in (2, 3)  # both may be of one session


def test_a_folder_belongs_to_one_store(tmp_path: Path) -> None:
    with filled(tmp_path), pytest.raises(HistoryError, match="in use"):
        opened(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(HistoryError, match="file"):
        opened(tmp_path / "file")


def test_a_session_lives_as_long_as_it_is_used_also_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.time", lambda: 1e9 + now[0])
    monkeypatch.setattr("time.time_ns", lambda: int(1e9 * (1e9 + now[0])))
    times: dict[str, Any] = {"host": 0, "clock": lambda: now[0], "ttl_s": 10.0}
    with opened(tmp_path, **times) as store:
        store.put("a", TOKENS, rows("a", TOKENS))
        store.put("b", TOKENS, rows("b", TOKENS))
        for now[0] in (8.0, 16.0):
            assert store.get("a", TOKENS).tokens == 11
    now[0] = 25.0
    with opened(tmp_path, **times) as store:
        assert (store.tier("a"), store.tier("b")) == ("disk", None)
        now[0] = 26.5
        assert store.get("a", TOKENS).tokens == 0


def test_what_the_store_has_not_made_is_named_and_stays(tmp_path: Path) -> None:
    documents, store = tmp_path / "documents", tmp_path / "store"
    with filled(store) as opened_store:
        block, *_ = files_of(opened_store, "s0")
    documents.mkdir()
    for name in ("thesis.tex", f"{0:032x}.safetensors"):
        (documents / name).write_text("precious")
    odd = [store / "sessions" / name for name in ("x.json", f"{0:032x}.json", f"{1:032x}.json", "notes.txt")]
    odd += [store / "blocks" / "zz", block.parent / "thesis.tex", block.with_name(f"{1:032x}.safetensors")]
    odd[0].mkdir()
    odd[1].symlink_to("/nowhere")
    os.mkfifo(odd[2])
    odd[3].touch()
    odd[4].symlink_to(documents, target_is_directory=True)
    odd[5].touch()
    odd[6].symlink_to(documents / "thesis.tex")
    for number in range(256):
        link = store / "blocks" / f"{number:02x}"
        if not link.exists():
            link.symlink_to(documents, target_is_directory=True)
            odd.append(link)
    os.mkfifo(store / "sessions" / f"a{ENDING}")
    before = {path: path.read_text() for path in documents.iterdir()}
    with all_warnings() as noticed, opened(store, host=0) as again:
        assert found(again) == NAMES
        assert {str(notice.message).partition(" is nothing")[0] for notice in noticed} == set(map(str, odd))
        for number in range(8):  # some of whose blocks belong behind a link
            again.put(str(number), TOKENS, rows(str(number), TOKENS))
        assert again.statistics.lost > 0
    assert all(os.path.lexists(path) for path in odd)
    assert {path: path.read_text() for path in documents.iterdir()} == before
    (store / "sessions").rename(tmp_path / "elsewhere")
    (store / "sessions").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(HistoryError, match=r"sessions \(links are not followed"):
        opened(store)


@pytest.mark.parametrize("shut", ["sessions", "blocks"])
def test_what_cannot_be_read_now_is_found_later(shut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(tmp_path) as store:
        assert store.contents.disk
        own = [store.contents.disk._session_path(store._key("s2")), files_of(store, "s2")[0].parent][shut == "blocks"]
    name = "read_bytes" if shut == "sessions" else "iterdir"
    real = getattr(Path, name)

    def read(path: Path) -> Any:
        if path == own:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, name, read)
        with pytest.warns(HistoryWarning, match=f"{own} cannot be read"), opened(tmp_path, host=0) as store:
            assert set(NAMES) > set(found(store)) > set()
    with opened(tmp_path, host=0) as store:
        assert found(store) == NAMES


class Writes:
    """Counts what the store asks of a disk, and lets some of it fail."""

    def __init__(self, patch: pytest.MonkeyPatch, fails: Fault) -> None:
        self.count, self.fails = 0, fails
        for owner, name in ((blocks, "open"), (Path, "replace"), (Path, "mkdir"), (Path, "unlink"), (os, "utime")):
            patch.setattr(owner, name, self._counted(getattr(owner, name, open)), raising=False)
        patch.setattr(os, "fsync", self._counted(lambda fd: None))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.count += 1
            if self.fails(self.count):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*given, **named)

        return call


class Work:
    """Sessions that come, grow, are cut and asked for. What is there must be right."""

    def __init__(self, store: WholeStore, seed: int) -> None:
        self.store, self.rng = store, random.Random(seed)
        self.known: dict[str, tuple[list[int], int]] = {}  # tokens, and how many were cut off before them

    def step(self) -> None:
        name = f"s{self.rng.randrange(5)}"
        tokens, dropped = self.known.get(name, ([], 0))
        new = [self.rng.randrange(500) for _ in range(self.rng.randrange(1, 12))]
        do = self.rng.choice(("put", "extend", "extend", "get", "get", "truncate"))
        if do == "truncate" and tokens:
            self.store.truncate(name)
            if self.store.lineage(name) is not None:
                self.known[name] = tokens[len(tokens) - len(tokens) // 2 :], dropped + len(tokens) - len(tokens) // 2
        elif do == "extend" and self.store.extend(
            name, len(tokens), new, rows(name, new, dropped + len(tokens)), lineage=self.store.lineage(name) or ""
        ):
            self.known[name] = [*tokens, *new], dropped
        elif do != "get":
            self.store.put(name, new, rows(name, new))
            self.known[name] = new, 0
        self.look(name)

    def look(self, name: str) -> None:
        tokens, dropped = self.known.get(name, ([], 0))
        history = self.store.get(name, tokens, self.store.lineage(name) or "")
        assert right(history, name, tokens, dropped)


def work(folder: Path, seed: int, steps: int, between: Callable[[int], None] = lambda step: None, **how: Any) -> Work:
    """Of a store with room for some of its sessions in memory, and for most on disk."""
    with opened(folder, **{"host": 30 * TOKEN_BYTES, "disk": 80 * TOKEN_BYTES} | how) as store:
        done = Work(store, seed)
        for step in range(steps):
            between(step)
            done.step()
        for name in done.known:
            done.look(name)
    return done


def is_sound(folder: Path, done: Work) -> None:
    """What another process finds: nothing wrong, nothing left over, and it goes on."""
    with opened(folder, host=0) as store:
        again = Work(store, 0)
        again.known = done.known
        for name in again.known:
            again.look(name)
        store.put("new", [1, 2, 3], rows("new", [1, 2, 3]))
        assert store.get("new", [1, 2, 3]).tokens == 3
        assert store.contents.disk
        named = sum(len(session.blocks) for session in store.contents.disk.sessions.values())
    assert len([path for path in (folder / "blocks").rglob("*") if path.is_file()]) == named


@lossy
@pytest.mark.parametrize("lasting", [False, True], ids=["for a moment", "from then on"])
@pytest.mark.parametrize("every", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_each_write_may_find_the_disk_full(every: int, lasting: bool, tmp_path: Path) -> None:
    def writes(folder: Path, fails: Fault) -> tuple[int, Work]:
        """From the first step on, how many there are."""
        with pytest.MonkeyPatch.context() as patch:
            made: list[Writes] = []
            done = work(folder, 1, 25, lambda step: made.append(Writes(patch, fails)) if not made else None)
            return made[0].count, done

    count, _ = writes(tmp_path / "whole", lambda number: False)
    assert count > 150
    for nth in range(1, count, every):
        folder = tmp_path / str(nth)
        fails = [lambda number, nth=nth: number == nth, lambda number, nth=nth: number >= nth][lasting]
        is_sound(folder, writes(folder, fails)[1])


@lossy
@pytest.mark.parametrize("threads", [0, 2])
def test_files_that_are_damaged_under_a_running_store(threads: int, tmp_path: Path) -> None:
    rng = random.Random(3)

    def damage(step: int, folder: Path) -> None:
        files = sorted(folder.rglob("*.safetensors"))
        if files and rng.random() < 0.5:
            with suppress(FileNotFoundError):  # a thread of the store has deleted it since
                rng.choice(DAMAGES)(rng.choice(files), rng)

    for number in range(6):
        folder = tmp_path / str(number)
        is_sound(folder, work(folder, number, 30, partial(damage, folder=folder), threads=threads))


@pytest.mark.parametrize("threads", [0, 2])
def test_a_folder_that_goes_away_costs_what_it_held(threads: int, tmp_path: Path) -> None:
    def remove(step: int) -> None:
        if step == 15:
            (tmp_path / "store").rename(tmp_path / "gone")

    with all_warnings() as noticed:
        done = work(tmp_path / "store", 5, 40, remove, threads=threads)
    assert {notice.category for notice in noticed} == {HistoryWarning}
    assert done.known
