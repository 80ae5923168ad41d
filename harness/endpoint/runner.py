"""Answers prepared examples by asking a server: `batch` requests at a time, or `model.rate` a second.
It makes the records that harness/jobs/runner.py makes of our own engine; what a client cannot see
stays empty."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from multiprocessing.pool import ThreadPool
from threading import Lock
from time import perf_counter, sleep
from typing import Any

import numpy as np

from evals.base import Task
from harness.config.settings import Settings
from harness.endpoint.answers import Answer, costs_of, mean_nll, read_answer
from harness.endpoint.client import ServerRefused
from harness.endpoint.metrics import Metrics
from harness.endpoint.requests import PLAIN, Talk
from harness.endpoint.source import Endpoint
from harness.jobs.examples import PreparedExample, asked_tokenizer
from harness.jobs.likelihood import references
from harness.jobs.questions import Failed
from harness.jobs.replies import Rule, record_of, scored, stop_rule
from harness.jobs.runner import WARMUP_TOKENS
from harness.results.records import Record
from methods.tiers.tier import TIERS, bytes_key

MOST = 1024  # requests on their way under model.rate
WARMUP = 64  # last tokens or characters of a prompt: a whole one would stay in a prefix cache
COUNTED = ("prompt_tokens", "completion_tokens", "cached_tokens", "retries")
OTHER_PROMPT = (
    "the server counted other prompt tokens than our tokenizer: its chat template, its first tokens or its tokenizer "
    "differ"
)
UNSEEN: dict[str, Any] = {bytes_key(tier): None for tier in TIERS} | {
    "state_bytes": None,
    "sealed": True,  # as far as anybody here knows, which no warning is about
}
NO_LOGPROBS = "the server returns no logprobs of prompts"


class Meter:
    """Divides the time in which requests are on their way among them, in equal parts at any moment, so
    that the seconds charged to all requests add up to it."""

    def __init__(self) -> None:
        self._active, self._lock = 0, Lock()
        # when their number changed, and what a request was charged by then that was always there
        self._times, self._charged = [0.0], [0.0]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a request as on its way within this block."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            now = perf_counter()
            each = (now - self._times[-1]) / self._active if self._active else 0.0
            self._times.append(now)
            self._charged.append(self._charged[-1] + each)
            self._active += more

    def share(self, start: float, end: float) -> float:
        """Return the seconds from `start` to `end` (`perf_counter`) that are charged to a request that
        was on its way all the while and has ended."""
        with self._lock:
            return float(np.diff(np.interp([start, end], self._times, self._charged))[0])


@dataclass
class Exchange:
    """Hold what one example was answered, turn by turn."""

    item: PreparedExample
    turns: list[tuple[Answer, dict[str, Any]]] = field(default_factory=list)  # with its facts
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
        self.weighed = False  # whether a right answer's likelihood has been measured
        if model.prompts != "ids":
            self.no_likelihood = f"model.prompts={model.prompts} has no token ids of a prompt"
        elif model.rate is not None or settings.batch > 1:
            self.no_likelihood = "requests for it would disturb the others' times"

    @property
    def notes(self) -> dict[str, Any]:
        """The entries of run.json that say how the server was asked."""
        return {"no_likelihood": self.no_likelihood} if self.settings.measures_likelihood else {}

    def warm_up(self, pending: Sequence[PreparedExample]) -> None:
        """Send the first `warmup` requests with shorter prompts and answers, which are dropped."""
        for item in pending[: self.settings.warmup]:
            path, body = self._talk().ask(replace(item, new_tokens=WARMUP_TOKENS))
            if path == PLAIN:
                body["prompt"] = body["prompt"][-WARMUP:]
            for message in body.get("messages", ()):
                message["content"] = message["content"][-WARMUP:]
            self._answer(path, body)

    def answers(
        self, items: Iterable[PreparedExample], prefilled: Mapping[str, Any] | None = None
    ) -> Iterator[Exchange | Failed]:
        """Yield the answers to `items` in the order in which they end. If the server is gone, those that
        are on their way are waited for, and its error is raised. `prefilled` is there for runs of our
        own engine, and empty."""
        items, rate, began = list(items), self.model.rate, perf_counter()
        gone = list[OSError]()

        def ask(numbered: tuple[int, PreparedExample]) -> Exchange | Failed | None:
            place, item = numbered
            if rate is not None:
                sleep(max(0.0, began + place / rate - perf_counter()))
            try:
                return None if gone else self._asked(item)
            except OSError as error:
                gone.append(error)
                return None
            except Exception as error:
                return Failed(item, error)

        self.metrics.look()
        workers = self.settings.batch if rate is None else min(len(items), MOST)
        with ThreadPool(max(workers, 1)) as pool:
            yield from filter(None, pool.imap_unordered(ask, enumerate(items)))
        if gone:
            raise gone[0]

    def _asked(self, item: PreparedExample) -> Exchange:
        """Ask for the answers to an example, turn after turn, or how likely given ones are."""
        exchange, history = Exchange(item), 0
        talk = self._talk()
        for turn, then in zip_longest(item.turns, item.turns[1:]):
            request = talk.ask(turn)
            facts: dict[str, Any] = {}
            if turn.given:
                answer, fed = self._weighed(talk, turn), list(turn.forced)
            else:
                answer, facts = self._said(exchange, talk, turn, *request)
                fed = answer.tokens
            exchange.turns.append((answer, facts | {"history_tokens": history}))
            history += len(turn.prompt.ids) + len(fed)
            if then is not None:
                talk.answered(then, answer.text, fed, self.tokenizer.eos_token_id)
        exchange.served |= self.metrics.look()
        return exchange

    def _talk(self) -> Talk:
        return Talk(self.model, self.settings, self.tokenizer)

    def _said(
        self, exchange: Exchange, talk: Talk, turn: PreparedExample, path: str, body: dict[str, Any]
    ) -> tuple[Answer, dict[str, Any]]:
        """Return the answer to a turn and its facts, and add to `exchange` what the server counted."""
        answer, retries = self._answer(path, body)
        if not answer.tokens:
            raise ServerRefused("The server gave an empty answer, of which nothing is known.")
        usage = answer.usage
        said = usage | (usage.get("prompt_tokens_details") or {}) | {"retries": retries}
        for key in COUNTED:
            if said.get(key) is not None:
                exchange.served[key] = exchange.served.get(key, 0) + said[key]
        if not exchange.turns and said.get("prompt_tokens") not in (None, len(turn.prompt.ids)):
            exchange.warnings.append(OTHER_PROMPT)
        began, end = answer.began, answer.began + answer.token_s[-1]
        facts = {
            "share_s": self.meter.share(began, end),
            "decode_share_s": self.meter.share(began + answer.token_s[:2][-1], end),
            "answer_nll": self._likelihood(talk, turn),
        }
        text = self._rule(turn).text(answer.tokens) if turn.thought else answer.text
        return replace(answer, text=text), facts

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[Answer, int]:
        read = partial(read_answer, tokenizer=self.tokenizer, stops=body.get("stop", ()))
        return self.client.send(path, body, read, self.meter.running)

    def _likelihood(self, talk: Talk, turn: PreparedExample) -> float | None:
        """Return the mean negative log-likelihood of the most likely right answer, as
        harness/jobs/likelihood.py measures it: per token behind the first, or behind an empty thought."""
        if not self.settings.measures_likelihood or self.no_likelihood:
            return None
        before = turn.thought.empty if turn.thought else ()
        texts = [[*before, *reference] for reference in references(turn, self.tokenizer)]
        try:
            weights = [self._weights(talk, tokens) for tokens in texts if len(tokens) > 1]
        except ServerRefused:
            if not self.weighed:  # else it refuses this one alone
                self.no_likelihood = NO_LOGPROBS
            return None
        self.weighed = True
        return min((mean_nll(each[len(before) or 1 :]) for each in weights), default=None)

    def _weights(self, talk: Talk, tokens: Sequence[int]) -> list[tuple[float, bool]]:
        said = self.client.whole(PLAIN, talk.echoed(tokens))
        costs = costs_of(said, len(talk.ids), len(tokens))
        if costs is None:
            raise ServerRefused(
                f"This task asks how likely given texts are, and {NO_LOGPROBS}: measure one that does (vLLM)."
            )
        return costs

    def _weighed(self, talk: Talk, turn: PreparedExample) -> Answer:
        """Ask how likely given texts are: choices, or one that is fed in place of an answer. The answer
        has one token, since a server that reads a text at once shows no time for each."""
        given, began = turn.choices or (turn.forced,), perf_counter()
        weights = [self._weights(talk, tokens) for tokens in given]
        took = perf_counter() - began
        joint = [(sum(cost for cost, _ in each), all(top for _, top in each)) for each in weights]
        output = json.dumps(joint) if turn.choices else repr(mean_nll(weights[0]))
        return Answer(began, output, list(given[0][:1]), [took], "forced", {})

    def _rule(self, turn: PreparedExample) -> Rule:
        eos = self.tokenizer.eos_token_id
        return stop_rule(turn, self.tokenizer, [eos] if isinstance(eos, int) else [])

    def record(self, exchange: Exchange) -> Record:
        item = exchange.item
        turns = zip(item.turns, item.example.turns, exchange.turns, strict=True)
        replies = [
            {
                **UNSEEN,
                **scored(self.task, turn, example, self._rule(turn), answer.text, answer.tokens),
                "context_tokens": None,
                "stop": answer.stop,
                "token_s": answer.token_s,
                **facts,
            }
            for turn, example, (answer, facts) in turns
        ]
        warnings = [*item.facts["warnings"], *dict.fromkeys(exchange.warnings)]
        facts = {"warnings": warnings, "served": exchange.served}
        return record_of(item, replies, facts, save_prompts=self.settings.results.save_prompts)
