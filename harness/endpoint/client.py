"""Speaks HTTP with an OpenAI-compatible server: sends a request, reads its stream with a clock, tries
again where that can help, and says in one sentence what went wrong."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from textwrap import shorten
from time import perf_counter
from typing import Any, TypeVar
from urllib.parse import urlsplit

from harness.models.base import ModelError

# seconds before each further try, unless the server names its own (Retry-After)
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
MOST_WAIT = 60.0  # seconds that a server may ask for
BUSY = (408, 425, 429, 500, 502, 503, 504)  # statuses after which the same request may succeed
SAID = 300  # characters of a server's own words in an error
SAME = "the same command then goes on"
# what servers say of a request that they refuse -> what helps
REMEDIES = {
    r"context|too long|maximum.*tokens": ": set model.window to what it takes, and too_long=skip",
    r"prompt must be a string|valid string": ": set model.prompts=text",
}
ADDRESS = re.compile(r"https?://(\[[\da-f:]+\]|[^/@?#\s:]+)(:\d+)?(/[^?#\s]*)?")
T = TypeVar("T")
Event = tuple[float, dict[str, Any]]  # when it came (`perf_counter`), and what it says


class ServerGone(ConnectionError):
    """Report that the server answers no request, so that the run must end."""


class ServerRefused(ValueError):
    """Report that the server refuses one request; others may succeed."""


class TryAgain(Exception):
    """Report that the same request may succeed later, after `wait_s` seconds if the server says when.
    `one`: if it never does, this request alone is at fault."""

    def __init__(self, why: str, wait_s: float | None = None, *, one: bool = False) -> None:
        super().__init__(why)
        self.wait_s, self.one = wait_s, one


@dataclass(frozen=True)
class Client:
    """Sends requests to the server at `url` (`http://host:port/v1`). `key`: the environment variable
    that holds its key, which is sent to it and shown nowhere. `timeout_s`: for how long it may be
    silent."""

    url: str
    key: str
    timeout_s: float

    def __post_init__(self) -> None:
        if not self.key.isidentifier():
            raise ModelError(
                "model.key names the environment variable that holds the key, and is not the key itself."
            )
        if not (self._secret.isascii() and self._secret.isprintable()):
            raise ModelError(
                f"The environment variable {self.key} holds characters that no key has."
            )
        if not ADDRESS.fullmatch(self.url):
            raise ModelError(
                "model.url is no plain address: write it as http://localhost:8000/v1, and put a key into the "
                f"environment variable {self.key}."
            )

    @property
    def _secret(self) -> str:
        return os.environ.get(self.key, "").strip()

    def send(
        self,
        path: str,
        body: dict[str, Any] | None,
        read: Callable[[float, Iterator[Event]], T],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        patient: bool = True,
    ) -> tuple[T, int]:
        """POST `body` to `path` below the address, or GET it without a body. Return what `read` makes
        of the answer's events, given the time at which the request was sent, and how often it was
        tried in vain. Unless `patient`, a server that is not there is asked once, and one that says that
        it is busy, or loads its model, again. `around` is entered for each try. Raise `ServerRefused` or
        `ServerGone`."""
        silent = 0
        for retries, usual in enumerate((*WAITS, None)):
            try:
                with around():
                    return self._once(path, body, read), retries
            except ServerGone:
                raise
            except (TryAgain, OSError, HTTPException) as error:
                failed = error
            silent += isinstance(failed, TimeoutError)
            if usual is None or silent > 1 or not (patient or isinstance(failed, TryAgain)):
                break
            asked = getattr(failed, "wait_s", None)
            time.sleep(usual if asked is None else min(asked, MOST_WAIT))
        why = self._words(failed)
        if getattr(failed, "one", False):
            raise ServerRefused(f"The server fails on this request ({why}): its own log says more.")
        remedy = "start the server, or correct model.url"
        if isinstance(failed, TryAgain):
            remedy = "give it time, or fewer requests at once (batch, model.rate)"
        raise ServerGone(f"{self.url} gives no answer ({why}): {remedy}; {SAME}.") from failed

    def whole(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """POST `body` to `path`, or GET it without one, and then not `patient`. Return the whole answer:
        JSON, or a text under `text`."""
        return self.send(path, body, lambda _, events: next(events)[1], patient=bool(body))[0]

    def _once(
        self, path: str, body: dict[str, Any] | None, read: Callable[[float, Iterator[Event]], T]
    ) -> T:
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        assert parts.hostname
        connection = kind(parts.hostname, parts.port, timeout=self.timeout_s)
        headers = {"Content-Type": "application/json"}
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        place = path if path.startswith("/") else f"{parts.path}/{path}"
        try:
            connection.connect()  # which is none of the answer's time
            began = perf_counter()
            sent = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", place, sent, headers)
            response = connection.getresponse()
            if response.status != 200:
                said = response.read().decode(errors="replace")
                self._raise(response.status, said, response.getheader("Retry-After", ""))
            return read(began, self._events(response, streamed=bool(body and body.get("stream"))))
        finally:
            connection.close()

    def _events(self, response: HTTPResponse, *, streamed: bool) -> Iterator[Event]:
        """Yield the events of a stream as they come, or the whole answer as one: JSON, or a text under
        `text`. Raise `TryAgain` for one that is broken off."""
        if not streamed:
            content = response.read().decode()
            if "json" not in response.getheader("Content-Type", ""):
                content = json.dumps({"text": content})
            yield perf_counter(), self._parsed(content)
            return
        if "event-stream" not in response.getheader("Content-Type", ""):
            raise ServerGone(
                f"{self.url} answers in one piece, which shows no times: measure a server that streams."
            )
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = self._parsed(data)
            if error_said := event.get("error"):
                code = error_said.get("code") if isinstance(error_said, dict) else None
                self._raise(code if isinstance(code, int) else 500, json.dumps(error_said))
            yield perf_counter(), event

    def _parsed(self, content: str | bytes) -> dict[str, Any]:
        try:
            parsed = json.loads(content)
        except ValueError as error:
            raise TryAgain("its answer is no JSON") from error
        return parsed if isinstance(parsed, dict) else {}

    def _raise(self, status: int, said: str, wait: str = "") -> None:
        """Raise the error for an answer with an HTTP status other than 200."""
        words = f"HTTP {status}: {self._shown(said)}"
        if status in (401, 403):
            raise ServerGone(
                f"{self.url} refuses the key (HTTP {status}): put the right one into the environment variable "
                f"{self.key}; {SAME}."
            )
        if status // 100 == 3 or status in (404, 405):
            raise ServerGone(
                f"{self.url} does not know what it is asked for ({words}): let model.url end as the server's address "
                f"does, often in /v1, and model.name be a model that it serves; {SAME}."
            )
        if status in BUSY:
            raise TryAgain(words, float(wait) if wait.isdecimal() else None, one=status == 500)
        remedy = next((then for sign, then in REMEDIES.items() if re.search(sign, said, re.I)), "")
        raise ServerRefused(f"The server refuses this request ({words}){remedy}.")

    def _words(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"silent for model.timeout_s={self.timeout_s:g} seconds"
        kind = "" if isinstance(error, TryAgain) else f"{type(error).__name__}: "
        return self._shown(f"{kind}{error}")

    def _shown(self, text: str) -> str:
        """Return a server's words in one line, without the key, should they repeat it."""
        if self._secret:
            text = text.replace(self._secret, "[the key]")
        return shorten(text, SAID, placeholder=" ...").rstrip(".")
