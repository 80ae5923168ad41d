"""Whatever damages the folder of a store costs sessions, never a run: what comes back is what was stored, and a notice
says what is gone. Damages are drawn with a seed, over the index, its log and the files of blocks."""

from __future__ import annotations

import random
import re
import shutil
import sqlite3
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from harness.cachedattention.store import index
from harness.cachedattention.store.disk import HistoryWarning
from harness.cachedattention.store.history_store import HistoryStore
from tests.histories import opened, right, rows
from tests.warned import all_warnings

NAMES = [f"s{number}" for number in range(6)]
CUT = "s5"  # its oldest tokens have left: its rows serve no text of their own
TOKENS = list(range(100, 111))  # with blocks of 4: 4, 4, 3
COLUMNS = ("key", "used", "used_at", "content", "sha256")
NO_TEXT = "cast(x'c3' as text)"
NUMBERS = ("0", "-1", "7", "9223372036854775807", "1e300", "9e999", "null")
TEXTS = ("''", "'x'", "'../../x'", "'[1, \"'", "'{\"a\": 1'", NO_TEXT, "x'00ff'", "zeroblob(8)")
Damage = Callable[[Path, random.Random], None]


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


def overwrite(file: Path, rng: random.Random) -> None:
    """Some bytes in the middle."""
    data = bytearray(file.read_bytes())
    if data:
        start = rng.randrange(len(data))
        data[start : start + 200] = rng.randbytes(len(data[start : start + 200]))
    file.write_bytes(data)


def sql(file: Path, rng: random.Random) -> None:
    """Rows as another program would leave them: of wrong types, of other sessions; a table that lacks."""
    column, other = rng.choice(COLUMNS), rng.choice(COLUMNS)
    some = "rowid = (select rowid from sessions order by random() limit 1)"
    value = rng.choice((*NUMBERS, *TEXTS, other))
    statement = rng.choice(
        (
            *[f"update sessions set {column} = {value} where {some}"] * 8,
            f"update sessions set {column} = {value}",
            f"update sessions set content = (select content from sessions where {some}) where {some}",
            "drop table sessions",
            f"alter table sessions rename column {column} to other",
            f"pragma user_version = {rng.choice((0, 3, 7))}",
        )
    )
    connection = sqlite3.connect(file.parent / index.NAME)
    with suppress(sqlite3.IntegrityError), connection:  # the table forbids some
        connection.execute("pragma ignore_check_constraints = on")
        connection.execute(statement)
    connection.close()


DAMAGES: tuple[Damage, ...] = (flip, flip, cut, delete, garbage, overwrite, sql, sql, sql)


def stored(folder: Path) -> None:
    """A store that ended as it should."""
    with opened(folder, host=0) as store:
        for name in NAMES:
            store.put(name, TOKENS, rows(name, TOKENS))
        store.truncate(CUT, 7 / 11)


def killed(folder: Path) -> None:
    """One that did not: its log is there."""
    store = opened(folder / "whole", host=0)
    for name in NAMES:
        store.put(name, TOKENS, rows(name, TOKENS))
    store.truncate(CUT, 7 / 11)
    for path in (folder / "whole").iterdir():
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)
    store.close()
    shutil.rmtree(folder / "whole")


def found(store: HistoryStore) -> list[str]:
    """The sessions that are there; none may come with rows that are not its own, nor with rows behind a cut."""
    there = []
    for name in NAMES:
        tokens = TOKENS[4:] if name == CUT else TOKENS
        one = store.get(name, tokens)
        assert right(one, name, tokens)
        assert not (one.tokens and name == CUT)
        if name == CUT and (lineage := store.lineage(name)):
            one = store.get(name, tokens, lineage)
            assert right(one, name, tokens, dropped=4)
        there += [name] * bool(one.tokens)
    return there


def goes_on(folder: Path) -> tuple[list[str], list[str]]:
    """What is found in `folder`, and what was noticed; afterwards the store works as ever."""
    with all_warnings() as noticed, opened(folder, host=0) as store:
        there = found(store)
        store.put("new", TOKENS, rows("new", TOKENS))
        assert right(store.get("new", TOKENS), "new", TOKENS)
    assert all(one.category is HistoryWarning for one in noticed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened(folder, host=0) as store:
            assert found(store) == there
            assert store.get("new", TOKENS).tokens == len(TOKENS)
    return there, [str(one.message) for one in noticed]


@pytest.mark.parametrize("ended", [stored, killed])
@pytest.mark.parametrize(("seed", "rounds"), [(1, 25), pytest.param(2, 1500, marks=pytest.mark.slow)])
def test_a_damaged_folder_costs_sessions_and_no_run(
    ended: Callable[[Path], None], seed: int, rounds: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    whole = tmp_path / "whole"
    whole.mkdir()
    ended(whole)
    unharmed = 0
    for number in range(rounds):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        damage = rng.choice(DAMAGES)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        of_index = [file for file in files if file.name.startswith(index.NAME)]
        file = rng.choice(of_index if damage is sql or rng.random() < 0.7 else files)
        damage(file, rng)
        try:
            there, noticed = goes_on(folder)
        except Exception as error:
            raise AssertionError(f"round {number}: {damage.__name__} of {file.name}") from error
        told = (
            noticed or there == NAMES or file.name.endswith(("-wal", "-shm"))
        )  # a log loses its end, as in a power cut
        assert told, f"round {number}: {damage.__name__} of {file.name}"
        unharmed += there == NAMES
        shutil.rmtree(folder)
    assert 0 < unharmed < rounds


@pytest.mark.parametrize(
    "statement",
    [
        f"update sessions set content = {NO_TEXT} where key like '%/s2'",
        f"update sessions set key = {NO_TEXT} where key like '%/s2'",
        "update sessions set content = 5 where key like '%/s2'",
        "update sessions set content = replace(content, '100', '101') where key like '%/s2'",
        "update sessions set used = 9223372036854775807 where key like '%/s2'",
        "update sessions set used_at = 9e999 where key like '%/s2'",
        "drop table sessions",
    ],
)
def test_an_index_that_says_something_wrong_is_made_anew(statement: str, tmp_path: Path) -> None:
    stored(tmp_path)
    connection = sqlite3.connect(tmp_path / index.NAME)
    with connection:
        connection.execute(statement)
    connection.close()
    there, noticed = goes_on(tmp_path)
    assert not there
    assert len(noticed) == 1
    assert re.search(r"index of .* is damaged \(.*\): all its sessions are dropped", noticed[0])


def test_a_table_whose_name_is_no_text(tmp_path: Path) -> None:
    """SQLite's own message about it is no text either."""
    stored(tmp_path)
    connection = sqlite3.connect(tmp_path / index.NAME)
    with connection:
        connection.execute("pragma writable_schema = on")
        connection.execute(f"update sqlite_master set name = {NO_TEXT}, sql = 'nothing' where name = 'sessions'")
    connection.close()
    there, noticed = goes_on(tmp_path)
    assert not there
    assert ["is damaged" in one and "all its sessions are dropped" in one for one in noticed] == [True]


def test_rows_behind_a_cut_never_pass_for_those_of_the_text(tmp_path: Path) -> None:
    stored(tmp_path)
    with opened(tmp_path, host=0) as store:
        lineage = store.lineage(CUT)
    assert lineage
    connection = sqlite3.connect(tmp_path / index.NAME)
    with connection:
        connection.execute("update sessions set content = replace(content, ?, '')", (lineage,))
    connection.close()
    with pytest.warns(HistoryWarning, match="damaged"), opened(tmp_path, host=0) as store:
        assert store.get(CUT, TOKENS[4:]).tokens == 0
