"""A server of OpenAI's interface for tests: a tiny model of transformers behind http.server, in a thread, with faults
on order. It knows vLLM's words as well."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "served"
WINDOW = 4096


@dataclass
class Server:
    """Answers greedily. `faults`: what becomes of the next requests for completions, one each: an HTTP status, or
    `half` (its stream breaks off) or `reset`. `dies_after`: requests, after which it is no more."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    entry: dict[str, Any] = field(default_factory=lambda: {"id": NAME, "root": "tiny", "max_model_len": WINDOW})
    metrics: str | None = None
    key: str | None = None
    takes_ids: bool = True
    gives_logprobs: bool = True
    says_usage: bool = True
    waits_for: int = 0  # requests on their way, before which none is answered
    dies_after: int | None = None
    loading: int = 0  # what it is asked of itself before the model is there
    faults: deque[int | str] = field(default_factory=deque)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    at_once: list[int] = field(default_factory=list)  # requests on their way, as each began
    running: int = 0
    lock: Lock = field(default_factory=Lock)

    def __enter__(self) -> Server:
        served = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                served.get(self)

            def do_POST(self) -> None:
                served.post(self)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/v1"

    @property
    def completions(self) -> list[dict[str, Any]]:
        """The requests for answers, without those of a warm-up."""
        return [body for _, body in self.asked if body.get("stream")]

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        if self.loading:
            self.loading -= 1
            whole(handler, 503, {"error": {"message": "Loading model"}})
        elif handler.path == "/v1/models":
            entry = self.entry | {"object": "model", "created": time.time_ns(), "permission": [time.time_ns()]}
            whole(handler, 200, {"object": "list", "data": [entry]})
        elif handler.path == "/metrics" and self.metrics is not None:
            whole(handler, 200, self.metrics.format(count=len(self.asked)))
        else:
            whole(handler, 404, {"detail": "Not Found"})

    def post(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.asked.append((handler.path, body))
            self.starts.append(time.perf_counter())
            self.running += 1
            self.at_once.append(self.running)
            dead = self.dies_after is not None and len(self.asked) > self.dies_after
            self.waits_for *= self.running < self.waits_for
            fault = "reset" if dead else self.faults.popleft() if self.faults else None
        while self.waits_for:
            time.sleep(0.001)
        try:
            self.answer(handler, body, fault)
        finally:
            with self.lock:
                self.running -= 1

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any], fault: int | str | None) -> None:
        if self.key and handler.headers["Authorization"] != f"Bearer {self.key}":
            return whole(handler, 401, {"error": {"message": f"no such key: {handler.headers['Authorization']}"}})
        if body["model"] != self.entry["id"]:
            return whole(handler, 404, {"error": {"message": f"The model {body['model']} does not exist."}})
        if fault == "reset":
            return handler.connection.close()
        if isinstance(fault, int):
            said = {"error": {"message": f"maximum context length is {WINDOW} tokens" if fault == 400 else "busy"}}
            return whole(handler, fault, said, {"Retry-After": "0"} if fault == 429 else {})
        if isinstance(body.get("prompt"), list) and not self.takes_ids:
            return whole(handler, 400, {"detail": "prompt must be a string."})
        ids = self.ids(body)
        if body.get("echo"):
            return whole(handler, 200, self.echo(ids))
        return self.stream(handler, body, ids, half=fault == "half")

    def ids(self, body: dict[str, Any]) -> list[int]:
        tokenizer: Any = self.tokenizer
        if "messages" in body:
            last = bool(body.get("continue_final_message"))
            options = {"add_generation_prompt": not last, "continue_final_message": last, "tokenize": False}
            text = tokenizer.apply_chat_template(body["messages"], **options)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        prompt = body["prompt"]
        return prompt if isinstance(prompt, list) else list(tokenizer(prompt)["input_ids"])

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        with self.lock:
            return self.model(torch.tensor([ids])).logits[0].float()

    def echo(self, ids: list[int]) -> dict[str, Any]:
        if not self.gives_logprobs:
            return {"choices": [{"text": "", "logprobs": None, "finish_reason": "length"}]}
        costs = self.logits(ids).log_softmax(-1)
        own = [costs[place, token].item() for place, token in enumerate(ids[1:])]
        best = [{"best": costs[place].max().item()} for place in range(len(ids) - 1)]
        said = {"token_logprobs": [None, *own, -1.0], "top_logprobs": [None, *best, {"best": -1.0}]}
        return {"choices": [{"text": "", "logprobs": said, "finish_reason": "length"}]}

    def generated(self, body: dict[str, Any], ids: list[int]) -> Iterator[int]:
        ends = {self.tokenizer.eos_token_id, self.model.generation_config.eos_token_id}
        for _ in range(body["max_tokens"]):
            token = int(self.logits(ids)[-1].argmax())
            ids = [*ids, token]
            yield token
            if token in ends and not body.get("ignore_eos"):
                return

    def stream(self, handler: BaseHTTPRequestHandler, body: dict[str, Any], ids: list[int], *, half: bool) -> None:
        chat = "messages" in body
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.end_headers()

        def send(text: str, token: list[int], finish: str | None = None) -> None:
            said = {"delta": {"content": text}} if chat else {"text": text}
            given = {"token_ids": token} if body.get("return_token_ids") else {}
            event({"choices": [{"index": 0, "finish_reason": finish, **said, **given}]})

        def event(value: Any) -> None:
            handler.wfile.write(f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode())
            handler.wfile.flush()

        tokens, told = list[int](), ""
        for token in self.generated(body, ids):
            tokens.append(token)
            text = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
            if half and len(tokens) == 2:
                return
            ready = text if not text.endswith("\ufffd") else told
            send(ready[len(told) :], [token])
            told = ready
        finish = "length" if len(tokens) == body["max_tokens"] else "stop"
        send(str(self.tokenizer.decode(tokens, skip_special_tokens=True))[len(told) :], [], finish)
        if self.says_usage and body.get("stream_options", {}).get("include_usage"):
            event({"choices": [], "usage": {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}})
        event("[DONE]")


def whole(
    handler: BaseHTTPRequestHandler, status: int, content: dict[str, Any] | str, headers: dict[str, str] | None = None
) -> None:
    """Answer in one piece: JSON, or a text."""
    handler.send_response(status)
    kind = "text/plain" if isinstance(content, str) else "application/json"
    for name, value in {"Content-Type": kind, **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write((content if isinstance(content, str) else json.dumps(content)).encode())
