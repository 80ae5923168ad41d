"""Data files, the hub served on this machine, and generated data on disk: made once, never half there."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest

from evals.base import MissingData, TaskEnv, TaskError
from evals.cache import key_hash, load_or_make
from evals.data import Source, open_content, open_rows
from evals.hub import reachable
from tests.evals.local_hub import COMMIT, REPO, Hub, environment, served

ROWS = [{"input": "who?", "n": 1}, {"input": "line\r separators \u2028 inside", "n": 2}]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()

FETCH = """
import json, sys
from evals.base import TaskEnv, TaskError
from evals.data import Source, open_rows
try:
    rows = open_rows(Source(**json.loads(sys.argv[1])), TaskEnv(text=None, seed=0))
    print(json.dumps({**rows.provenance, "rows": rows.rows}))
except TaskError as error:
    print(json.dumps({"error": str(error)}))
"""


def env_of(root: Path | None) -> TaskEnv:
    return TaskEnv(text=cast(Any, None), seed=0, data_root=root)


def source(**changes: Any) -> Source:
    return Source(**{"name": "set/test", "local": ("set/test.jsonl", "Set/*/test.json"), **changes})


class TestLocal:
    def test_first_pattern_wins_and_rows_come_whole(self, tmp_path: Path) -> None:
        (tmp_path / "Set" / "deep").mkdir(parents=True)
        (tmp_path / "Set" / "deep" / "test.json").write_text('[{"n": 9}]')
        assert open_rows(source(), env_of(tmp_path)).origin == "local:Set/deep/test.json"
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "test.jsonl").write_bytes(JSONL)
        rows = open_rows(source(), env_of(tmp_path))
        assert rows.rows == ROWS
        assert rows.provenance == {
            "origin": "local:set/test.jsonl",
            "sha256": hashlib.sha256(JSONL).hexdigest(),
            "rows": 2,
        }

    @pytest.mark.parametrize("content", [JSONL[:-9], b"", b"[1]\n", b"5", b"\xff\xfe", b'{"a": "\xff"}'])
    def test_damaged_lines_are_refused(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "test.jsonl").write_bytes(content)
        with pytest.raises(TaskError, match=r"set/test: (row 1 of )?local:test.jsonl .*fetch it again"):
            open_rows(source(local=("test.jsonl",)), env_of(tmp_path))

    def test_zip_member_has_the_hash_of_the_plain_file(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("data/test.jsonl", JSONL * 50)
        found = open_content(source(local=("data.zip",), member="data/test.jsonl"), env_of(tmp_path))
        assert found.origin == "local:data.zip/data/test.jsonl"
        assert found.sha256 == hashlib.sha256(JSONL * 50).hexdigest()
        with pytest.raises(TaskError, match="holds no file other"):
            open_rows(source(local=("data.zip",), member="other"), env_of(tmp_path))

    def test_damaged_zip_is_refused(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
            archive.writestr("test.jsonl", JSONL)
        whole = (tmp_path / "data.zip").read_bytes()
        for damaged in (whole[:-30], whole.replace(b"who?", b"why?")):
            (tmp_path / "data.zip").write_bytes(damaged)
            with pytest.raises(TaskError, match=r"data.zip is cut short or damaged"):
                open_rows(source(local=("data.zip",), member="test.jsonl"), env_of(tmp_path))

    def test_parquet(self, tmp_path: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "test.parquet")
        assert open_rows(source(local=("test.parquet",)), env_of(tmp_path)).rows == ROWS
        (tmp_path / "test.parquet").write_bytes((tmp_path / "test.parquet").read_bytes()[:-20])
        with pytest.raises(TaskError, match="fetch it again"):
            open_rows(source(local=("test.parquet",)), env_of(tmp_path))

    def test_missing_names_set_places_and_remedy(self, tmp_path: Path) -> None:
        with pytest.raises(MissingData, match=r"set/test .*below the data root .*put the file at DATA/set/test.jsonl"):
            open_rows(source(), env_of(tmp_path))
        with pytest.raises(TaskError, match=r"the data root .*absent is not a folder"):
            open_rows(source(), env_of(tmp_path / "absent"))


@pytest.fixture
def hub() -> Iterator[Hub]:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("data/test.jsonl", JSONL)
    with served({"test.jsonl": JSONL, "data.zip": packed.getvalue()}) as hub:
        yield hub


def fetch(cache: Path, endpoint: str, *, offline: str = "0", **changes: Any) -> dict[str, Any]:
    """In a process of its own: the client reads its environment when it is imported."""
    environ = environment(cache, endpoint, offline)
    wanted = {"name": "set/test", "local": ["x.jsonl"], "hub_repo": REPO, "hub_file": "test.jsonl", **changes}
    command = [sys.executable, "-c", FETCH, json.dumps(wanted)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    return cast(dict[str, Any], json.loads(done.stdout))


class TestHub:
    def test_fetched_once_then_offline(self, hub: Hub, tmp_path: Path) -> None:
        first = fetch(tmp_path, hub.url)
        assert first["rows"] == ROWS
        assert first["origin"] == f"hub:{REPO}@{COMMIT}:test.jsonl"
        asked = [request for request in hub.requests if "resolve" in request]
        assert fetch(tmp_path, hub.url) == first == fetch(tmp_path, hub.url, offline="1")
        assert [request for request in hub.requests if "resolve" in request] == asked

    def test_zip_member_at_a_pinned_commit(self, hub: Hub, tmp_path: Path) -> None:
        got = fetch(tmp_path, hub.url, hub_file="data.zip", member="data/test.jsonl", hub_revision=COMMIT)
        assert got["origin"] == f"hub:{REPO}@{COMMIT}:data.zip/data/test.jsonl"
        assert got["sha256"] == hashlib.sha256(JSONL).hexdigest()

    def test_spoilt_downloads_are_refused(self, hub: Hub, tmp_path: Path) -> None:
        hub.sent["test.jsonl"] = JSONL.replace(b"who", b"why")  # the right size, the wrong content
        assert "is damaged (delete that file first)" in fetch(tmp_path, hub.url)["error"]

    def test_cut_downloads_are_refused(self, hub: Hub, tmp_path: Path) -> None:
        hub.sent["test.jsonl"] = JSONL[: JSONL.index(b"\n") + 1]  # ends behind a line, so only the size can tell
        assert "its download failed" in fetch(tmp_path, hub.url)["error"]
        assert not list(tmp_path.rglob("snapshots/*/test.jsonl"))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hub_file": "absent.jsonl"}, f"{REPO} on the hub has no file absent.jsonl at revision main"),
            ({"hub_revision": "v9"}, f"{REPO} on the hub has no revision v9"),
            ({"hub_repo": "no/where"}, "shows no data set no/where to you"),
        ],
    )
    def test_what_the_hub_lacks(self, hub: Hub, tmp_path: Path, changes: dict[str, str], message: str) -> None:
        assert message in fetch(tmp_path, hub.url, **changes)["error"]

    @pytest.mark.parametrize("offline", ["0", "1"])
    def test_without_network_one_sentence(self, tmp_path: Path, offline: str) -> None:
        error = fetch(tmp_path, "http://127.0.0.1:9", offline=offline)["error"]
        reason = "HF_HUB_OFFLINE forbids fetching it" if offline == "1" else "http://127.0.0.1:9 does not answer"
        assert reason in error
        assert f"hf download {REPO} test.jsonl --repo-type dataset --revision main --local-dir DATA`" in error


class _Refuses(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(403)

    def log_message(self, *args: Any) -> None:
        pass


def test_reachable_means_that_something_answers() -> None:
    with HTTPServer(("127.0.0.1", 0), _Refuses) as server:
        Thread(target=server.handle_request, daemon=True).start()
        assert reachable(f"http://127.0.0.1:{server.server_port}", within_s=600)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not reachable(f"http://127.0.0.1:{silent.getsockname()[1]}", within_s=0.2)
    assert not reachable("http://127.0.0.1:9")


KEY = {"task": "vt", "length": 1024, "seed": 42}
MADE = [{"context": "a\u2028b\r\nc", "references": ["é", "x"]}, {"context": "", "references": []}]


def never() -> list[dict[str, Any]]:
    raise AssertionError("made again")


def make_many(folder: Path) -> int:
    rows = [{"text": "x" * 1000, "number": number} for number in range(2000)]
    return len(load_or_make(folder, "big", KEY, lambda: rows))


def test_rows_come_back_as_made_and_are_made_once(tmp_path: Path) -> None:
    assert load_or_make(tmp_path / "new", "vt", KEY, lambda: MADE) == MADE
    assert load_or_make(tmp_path / "new", "vt", dict(reversed(KEY.items())), never) == MADE
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".jsonl"]


@pytest.mark.parametrize("field", ["task", "length", "seed"])
def test_every_field_of_the_key_counts(tmp_path: Path, field: str) -> None:
    load_or_make(tmp_path, "vt", KEY, lambda: MADE)
    other = {**KEY, field: 7}
    assert key_hash(other) != key_hash(KEY)
    assert load_or_make(tmp_path, "vt", other, list) == []


@pytest.mark.parametrize("keep", [0, 10, -2, -30])
def test_a_file_cut_short_is_made_again(tmp_path: Path, keep: int) -> None:
    load_or_make(tmp_path, "vt", KEY, lambda: MADE)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    assert load_or_make(tmp_path, "vt", KEY, lambda: MADE) == MADE
    assert path.read_bytes() == whole


@pytest.mark.parametrize("place", [5, 60, -12, -20, -60])
def test_a_changed_byte_is_not_read_as_a_prompt(tmp_path: Path, place: int) -> None:
    load_or_make(tmp_path, "vt", KEY, lambda: MADE)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[place] ^= 1
    path.write_bytes(changed)
    assert load_or_make(tmp_path, "vt", KEY, lambda: MADE) == MADE
    assert path.read_bytes() == whole


@pytest.mark.parametrize("head", [b"[]", b"5", b"null", b'{"key": 5}'])
def test_a_head_of_another_kind_is_made_again(tmp_path: Path, head: bytes) -> None:
    load_or_make(tmp_path, "vt", KEY, lambda: MADE)
    (path,) = tmp_path.iterdir()
    path.write_bytes(head + b"\n" + path.read_bytes().partition(b"\n")[2])
    assert load_or_make(tmp_path, "vt", KEY, lambda: MADE) == MADE


def test_failing_to_make_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        load_or_make(tmp_path, "vt", KEY, lambda: [{"context": object()}])
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_costs_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert load_or_make(tmp_path / "file", "vt", KEY, lambda: MADE) == MADE
    (said,) = caplog.messages
    assert "cannot be written (File exists): it is made again next time" in said


def killed(folder: Path) -> None:
    """A process that is killed before its rows have their name."""
    if not (child := os.fork()):
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        load_or_make(folder, "vt", KEY, lambda: MADE)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_what_a_killed_process_left_is_made_use_of(tmp_path: Path) -> None:
    for _ in range(2):
        killed(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert load_or_make(tmp_path, "vt", KEY, lambda: MADE) == MADE
    assert [path.suffix for path in tmp_path.iterdir()] == [".jsonl"]
    assert load_or_make(tmp_path, "vt", KEY, never) == MADE


def test_without_a_folder_nothing_is_kept() -> None:
    assert load_or_make(None, "vt", KEY, lambda: MADE) == MADE


def test_two_processes_may_make_the_same(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2) as pool:
        assert list(pool.map(make_many, [tmp_path] * 4)) == [2000] * 4
    assert len(list(tmp_path.iterdir())) == 1
