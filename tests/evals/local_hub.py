"""A hub on this machine, for clients that take HF_ENDPOINT."""

from __future__ import annotations

import hashlib
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
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(f"{handler.command} {handler.path}")
        body = self.files.get(handler.path.rpartition("/")[2], b"")  # the root is asked whether it answers
        handler.send_response(200)
        handler.send_header("X-Repo-Commit", COMMIT)
        handler.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body)


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
