"""Answers prepared examples by asking a server: `batch` requests at a time, or `model.rate` a second.
It makes the records that harness/jobs/runner.py makes of our own engine; what a client cannot see
stays empty."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import perf_counter, sleep
from typing import Any

from evals.base import Task
from harness.config.settings import Settings
from harness.endpoint.answers import Answer, costs_of, mean_nll, read_answer
from harness.endpoint.client import ServerRefused
from harness.endpoint.metrics import Metrics
from harness.endpoint.requests import CHAT, PLAIN, Talk
from harness.endpoint.source import Endpoint
from harness.jobs.examples import PreparedExample, asked_tokenizer
from harness.jobs.questions import Failed
from harness.jobs.replies import Rule, record_of, scored, stop_rule
from harness.prompts.teacher import answer_ids
from harness.results.records import Record
from methods.tiers.tier import TIERS, bytes_key

# last tokens of a prompt, and new tokens: a whole prompt would stay in a prefix cache
WARMUP = 64, 4
OTHER_PROMPT = (
    "the server counted other prompt tokens than our tokenizer: its chat template, its first tokens or its tokenizer "
    "differ"
)
UNSEEN: dict[str, Any] = {bytes_key(tier): None for tier in TIERS} | {
    "state_bytes": None,
    "sealed": True,  # as far as anybody here knows, which no warning is about
}
NO_LOGPROBS = "the server returns no logprobs of prompts"


@dataclass
class Meter:
    """Divides the time in which requests are on their way among them, in equal parts at any moment, so
    that the seconds charged to all requests add up to it."""

    _active: int = 0
    # (time, seconds that one request has been charged if it was there from the beginning)
    _points: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    _lock: Lock = field(default_factory=Lock)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        with self._lock:
            now = perf_counter()
            last, charged = self._points[-1]
            self._points.append(
                (now, charged + (now - last) / max(self._active, 1) * bool(self._active))
            )
            self._active += by

    def between(self, begin: float, end: float) -> float:
        """Return the seconds that a request is charged for a stretch of its time, which has ended."""
        return self._at(end) - self._at(begin)

    def _at(self, time: float) -> float:
        with self._lock:
            place = min(bisect_right(self._points, (time, float("inf"))), len(self._points) - 1)
            (left, low), (right, high) = self._points[place - 1 : place + 1]
        return low + (high - low) * min(1.0, (time - left) / max(right - left, 1e-12))


@dataclass
class Exchange:
    """Hold what one example was answered, turn by turn."""

    item: PreparedExample
    answers: list[Answer] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)  # of each turn
    served: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class EndpointRunner:
    """Turns prepared examples into records by asking the server of `model`."""

    def __init__(self, task: Task, settings: Settings, model: Endpoint) -> None:
        self.task, self.settings, self.model = task, settings, model
        self.client, self.meter = model.client, Meter()
        self.metrics = Metrics(self.client)
        self.tokenizer = asked_tokenizer(model.tokenizer(), settings)
        self.no_likelihood: str | None = None
        if model.prompts != "ids":
            self.no_likelihood = f"model.prompts={model.prompts} has no token ids of a prompt"
        elif model.rate is not None or settings.batch > 1:
            self.no_likelihood = "requests for it would disturb the others' times"

    def close(self) -> None:
        """Do nothing: each request has a connection of its own."""

    @property
    def notes(self) -> dict[str, Any]:
        """The entries of run.json that say how the server was asked."""
        wanted = self.settings.measures_likelihood
        return {"no_likelihood": self.no_likelihood if wanted else None}

    def warm_up(self, pending: Sequence[PreparedExample]) -> None:
        """Send `warmup` short requests, whose answers are dropped."""
        tokens, new_tokens = WARMUP
        for item in pending[: self.settings.warmup]:
            prompt = item.prompt
            ids = prompt.ids[-tokens:]
            short = replace(prompt, ids=ids, text=str(self.tokenizer.decode(ids)))
            path, body = self._talk().ask(replace(item, prompt=short, new_tokens=new_tokens))
            if path == CHAT:
                body["messages"] = [{"role": "user", "content": "Hello"}]
            self._answer(path, body, item)

    def answers(
        self, items: Iterable[PreparedExample], prefilled: Mapping[str, Any] | None = None
    ) -> Iterator[Exchange | Failed]:
        """Yield the answers to `items` in the order in which they end. If the server is gone, those that
        are on their way are waited for, and its error is raised. `prefilled` is there for runs of our
        own engine, and empty."""
        rate, waiting = self.model.rate, deque(items)
        most = self.settings.batch if rate is None else len(waiting)
        done: SimpleQueue[tuple[PreparedExample, Exchange | Exception]] = SimpleQueue()
        began, sent, running = perf_counter(), 0, 0
        gone: OSError | None = None
        self.metrics.look()
        while waiting or running:
            wait_s = 0.0 if rate is None else began + sent / rate - perf_counter()
            if waiting and running < most and wait_s <= 0:
                Thread(target=self._ask, args=(waiting.popleft(), done), daemon=True).start()
                sent, running = sent + 1, running + 1
                continue
            if not running:
                sleep(wait_s)
                continue
            try:
                item, outcome = done.get(timeout=wait_s if waiting and wait_s > 0 else None)
            except Empty:
                continue
            running -= 1
            if isinstance(outcome, OSError):
                gone = gone or outcome
                waiting.clear()
            elif isinstance(outcome, Exception):
                yield Failed(item, outcome)
            else:
                yield outcome
        if gone is not None:
            raise gone

    def _ask(
        self,
        item: PreparedExample,
        done: SimpleQueue[tuple[PreparedExample, Exchange | Exception]],
    ) -> None:
        try:
            outcome: Exchange | Exception = self._asked(item)
        except Exception as error:
            outcome = error
        done.put((item, outcome))

    def _talk(self) -> Talk:
        return Talk(self.model, self.settings, self.tokenizer)

    def _asked(self, item: PreparedExample) -> Exchange:
        """Ask for the answers to an example, turn after turn, or how likely given ones are."""
        exchange, talk, history = Exchange(item), self._talk(), 0
        for turn, then in zip_longest(item.turns, item.turns[1:]):
            path, body = talk.ask(turn)
            facts: dict[str, Any] = {}
            if turn.given:
                answer, fed = self._weighed(talk, turn), list(turn.forced)
            else:
                answer, facts = self._said(talk, turn, path, body, exchange)
                fed = answer.tokens
            exchange.answers.append(answer)
            exchange.facts.append({"history_tokens": history, **facts})
            history += len(turn.prompt.ids) + len(fed)
            if then is not None:
                talk.answered(then, answer.text, fed, self.tokenizer.eos_token_id)
        exchange.served |= self.metrics.look()
        return exchange

    def _said(
        self,
        talk: Talk,
        turn: PreparedExample,
        path: str,
        body: dict[str, Any],
        exchange: Exchange,
    ) -> tuple[Answer, dict[str, Any]]:
        """Return the answer to a turn and its facts, and add to `exchange` what the server counted."""
        answer, retries = self._answer(path, body, turn)
        if not answer.tokens:
            raise ServerRefused("The server gave an empty answer, of which nothing is known.")
        counted = {key: answer.usage.get(key) for key in ("prompt_tokens", "completion_tokens")}
        counted["cached_tokens"] = (answer.usage.get("prompt_tokens_details") or {}).get(
            "cached_tokens"
        )
        for key, value in {**counted, "retries": retries}.items():
            if value is not None:
                exchange.served[key] = exchange.served.get(key, 0) + value
        known = counted["prompt_tokens"]
        if not exchange.answers and known not in (None, len(turn.prompt.ids)):
            exchange.warnings.append(OTHER_PROMPT)
        second = answer.token_s[1] if len(answer.token_s) > 2 else answer.token_s[-1]
        begin, end = answer.began, answer.began + answer.token_s[-1]
        facts = {
            "share_s": self.meter.between(begin, end),
            "decode_share_s": self.meter.between(begin + second, end),
            "answer_nll": self._likelihood(talk, turn),
        }
        text = self._rule(turn).text(answer.tokens) if turn.thought else answer.text
        return replace(answer, text=text), facts

    def _answer(self, path: str, body: dict[str, Any], turn: PreparedExample) -> tuple[Answer, int]:
        stops = () if self.settings.generation.force_length else turn.example.stop
        return self.client.send(
            path,
            body,
            lambda began, events: read_answer(began, events, self.tokenizer, stops),
            self.meter.running,
        )

    def _likelihood(self, talk: Talk, turn: PreparedExample) -> float | None:
        """Return the mean negative log-likelihood of the most likely right answer, as
        harness/jobs/likelihood.py measures it: per token behind the first."""
        if not self.settings.measures_likelihood or self.no_likelihood:
            return None
        costs = list[float]()
        for reference in dict.fromkeys(filter(None, turn.example.references)):
            tokens = answer_ids(reference, turn.prompt, self.tokenizer)[: turn.answer_tokens]
            if len(tokens) > 1:
                weights = self._weights(talk, tokens)
                if weights is None:
                    self.no_likelihood = NO_LOGPROBS
                    return None
                costs.append(mean_nll(weights[1:]))
        return min(costs, default=None)

    def _weights(self, talk: Talk, tokens: Sequence[int]) -> list[tuple[float, bool]] | None:
        start, count = len(talk.ids), len(tokens)
        try:
            return self.client.send(
                PLAIN,
                talk.echoed(tokens),
                lambda _, events: costs_of(next(iter(events))[1], start, count),
                self.meter.running,
            )[0]
        except ServerRefused:
            return None

    def _weighed(self, talk: Talk, turn: PreparedExample) -> Answer:
        """Ask how likely given texts are: choices, or one that is fed in place of an answer. The answer
        has one token, since a server that reads a text at once shows no time for each."""
        weights, given = list[list[tuple[float, bool]]](), turn.choices or (turn.forced,)
        began = perf_counter()
        for tokens in given:
            if (one := self._weights(talk, tokens)) is None:
                raise ServerRefused(
                    f"This task asks how likely given texts are, and {NO_LOGPROBS}: measure one that does (vLLM)."
                )
            weights.append(one)
        took = perf_counter() - began
        joint = [(sum(cost for cost, _ in each), all(top for _, top in each)) for each in weights]
        output = json.dumps(joint) if turn.choices else repr(mean_nll(weights[0]))
        return Answer(output, list(given[0][:1]), [took], "forced", began, {})

    def _rule(self, turn: PreparedExample) -> Rule:
        eos = self.tokenizer.eos_token_id
        return stop_rule(turn, self.tokenizer, [eos] if isinstance(eos, int) else [])

    def record(self, exchange: Exchange) -> Record:
        item, replies = exchange.item, list(self._replies(exchange))
        warnings = [*item.facts["warnings"], *dict.fromkeys(exchange.warnings)]
        facts = {"warnings": warnings, "served": exchange.served}
        return record_of(item, replies, facts, save_prompts=self.settings.results.save_prompts)

    def _replies(self, exchange: Exchange) -> Iterator[dict[str, Any]]:
        """Yield what is known of each turn, by the keys of a line, with its score."""
        turns = exchange.item.turns, exchange.item.example.turns
        for turn, example, answer, facts in zip(
            *turns, exchange.answers, exchange.facts, strict=True
        ):
            yield {
                **UNSEEN,
                **scored(self.task, turn, example, self._rule(turn), answer.text, answer.tokens),
                "context_tokens": None,
                "stop": answer.stop,
                "token_s": answer.token_s,
                **facts,
            }
