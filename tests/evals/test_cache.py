"""Generated data on disk: made once, made again when damaged, never half there."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from evals.cache import key_hash, load_or_make

KEY = {"task": "vt", "length": 1024, "seed": 42}
ROWS = [{"context": "a\u2028b\r\nc", "references": ["é", "x"]}, {"context": "", "references": []}]


def never() -> list[dict[str, Any]]:
    raise AssertionError("made again")


def make_many(folder: Path) -> int:
    rows = [{"text": "x" * 1000, "number": number} for number in range(2000)]
    return len(load_or_make(folder, "big", KEY, lambda: rows))


def test_rows_come_back_as_made_and_are_made_once(tmp_path: Path) -> None:
    assert load_or_make(tmp_path / "new", "vt", KEY, lambda: ROWS) == ROWS
    assert load_or_make(tmp_path / "new", "vt", dict(reversed(KEY.items())), never) == ROWS
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".jsonl"]


@pytest.mark.parametrize("field", ["task", "length", "seed"])
def test_every_field_of_the_key_counts(tmp_path: Path, field: str) -> None:
    load_or_make(tmp_path, "vt", KEY, lambda: ROWS)
    other = {**KEY, field: 7}
    assert key_hash(other) != key_hash(KEY)
    assert load_or_make(tmp_path, "vt", other, list) == []


@pytest.mark.parametrize("keep", [0, 10, -2, -30])
def test_a_file_cut_short_is_made_again(tmp_path: Path, keep: int) -> None:
    load_or_make(tmp_path, "vt", KEY, lambda: ROWS)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    assert load_or_make(tmp_path, "vt", KEY, lambda: ROWS) == ROWS
    assert path.read_bytes() == whole


@pytest.mark.parametrize("place", [5, 60, -12, -20, -60])
def test_a_changed_byte_is_not_read_as_a_prompt(tmp_path: Path, place: int) -> None:
    load_or_make(tmp_path, "vt", KEY, lambda: ROWS)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[place] ^= 1
    path.write_bytes(changed)
    assert load_or_make(tmp_path, "vt", KEY, lambda: ROWS) == ROWS
    assert path.read_bytes() == whole


@pytest.mark.parametrize("head", [b"[]", b"5", b"null", b'{"key": 5}'])
def test_a_head_of_another_kind_is_made_again(tmp_path: Path, head: bytes) -> None:
    load_or_make(tmp_path, "vt", KEY, lambda: ROWS)
    (path,) = tmp_path.iterdir()
    path.write_bytes(head + b"\n" + path.read_bytes().partition(b"\n")[2])
    assert load_or_make(tmp_path, "vt", KEY, lambda: ROWS) == ROWS


def test_failing_to_make_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        load_or_make(tmp_path, "vt", KEY, lambda: [{"context": object()}])
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_costs_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert load_or_make(tmp_path / "file", "vt", KEY, lambda: ROWS) == ROWS
    (said,) = caplog.messages
    assert "cannot be written (File exists): it is made again next time" in said


def killed(folder: Path) -> None:
    """A process that is killed before its rows have their name."""
    if not (child := os.fork()):
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        load_or_make(folder, "vt", KEY, lambda: ROWS)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_what_a_killed_process_left_is_made_use_of(tmp_path: Path) -> None:
    for _ in range(2):
        killed(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert load_or_make(tmp_path, "vt", KEY, lambda: ROWS) == ROWS
    assert [path.suffix for path in tmp_path.iterdir()] == [".jsonl"]
    assert load_or_make(tmp_path, "vt", KEY, never) == ROWS


def test_without_a_folder_nothing_is_kept() -> None:
    assert load_or_make(None, "vt", KEY, lambda: ROWS) == ROWS


def test_two_processes_may_make_the_same(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2) as pool:
        assert list(pool.map(make_many, [tmp_path] * 4)) == [2000] * 4
    assert len(list(tmp_path.iterdir())) == 1
