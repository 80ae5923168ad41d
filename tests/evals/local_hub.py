"""A hub on this machine, for clients that take HF_ENDPOINT."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

COMMIT = "5" * 40
REPO = "someone/some-set"


def environment(cache: Path, endpoint: str, offline: str = "0") -> dict[str, str]:
    """Return the environment of a process that knows this hub alone. Clients read it when they are imported."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    hub = {"HF_HOME": str(cache), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_TELEMETRY": "1"}
    return environ | hub


@dataclass
class Hub:
    """Has one data set, `REPO`: what the real hub answers of it, and its files with the real hub's headers."""

    files: dict[str, bytes]
    sent: dict[str, bytes] = field(default_factory=dict)  # what the body really is, where a file is spoilt
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(f"{handler.command} {handler.path}")
        _, asked, tail = handler.path.partition(f"/api/datasets/{REPO}")
        if asked:
            tree, info = (
                "/tree/" in tail,
                {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": n} for n in self.files]},
            )
            body = json.dumps(self._tree() if tree else info).encode()
            _send(handler, body, body, {"Content-Type": "application/json"})
        else:
            self._file(handler)

    def _tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in self.files.items()
        ]

    def _file(self, handler: BaseHTTPRequestHandler) -> None:
        _, _, tail = handler.path.partition(f"/datasets/{REPO}/resolve/")
        revision, _, name = tail.partition("/")
        if revision not in ("main", COMMIT) or name not in self.files:
            code = "EntryNotFound" if revision in ("main", COMMIT) else "RevisionNotFound" if tail else "RepoNotFound"
            _send(handler, b"", b"", {"X-Error-Code": code, "X-Repo-Commit": COMMIT}, status=404)
            return
        promised = self.files[name]
        etag = f'"{hashlib.sha256(promised).hexdigest()}"'
        _send(handler, promised, self.sent.get(name, promised), {"X-Repo-Commit": COMMIT, "ETag": etag})


def _send(
    handler: BaseHTTPRequestHandler, promised: bytes, sent: bytes, headers: dict[str, str], status: int = 200
) -> None:
    gets = handler.command == "GET"
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(sent if gets else promised)))
    handler.end_headers()
    if gets:
        handler.wfile.write(sent)


@contextmanager
def served(files: dict[str, bytes]) -> Iterator[Hub]:
    """Run a hub with these files."""
    hub = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.serve(self)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
