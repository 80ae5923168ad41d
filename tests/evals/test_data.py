"""Data files, the hub served on this machine, and generated data on disk: made once, never half there."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest

from evals.base import MissingData, TaskEnv, TaskError
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

    def test_missing_names_set_places_and_remedy(self, tmp_path: Path) -> None:
        with pytest.raises(MissingData, match=r"set/test .*below the data root .*put the file at DATA/set/test.jsonl"):
            open_rows(source(), env_of(tmp_path))
        with pytest.raises(TaskError, match=r"the data root .*absent is not a folder"):
            open_rows(source(), env_of(tmp_path / "absent"))
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "test.jsonl").write_text("{}")
        with pytest.raises(TaskError, match=rf"set/test is not below .* but beside it: name {tmp_path} instead"):
            open_rows(source(), env_of(tmp_path / "set"))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with served({"test.jsonl": JSONL}) as hub:
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
