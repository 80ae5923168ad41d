"""Runs lm-evaluation-harness's requests as sequences of a running batch: answers, likelihoods,
whole windows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from harness.engine.batch.running import RunningBatch
from harness.engine.batch.running_sequence import After, RunningSequence
from harness.engine.engine import Engine
from harness.engine.saved_state import Snapshot
from harness.prompts.teacher import Forced

Text: TypeAlias = "FreeAnswer | ScoredQuestion | ScoredWindow"
CHUNK = 512  # tokens of a window whose logits are computed at a time


def side_by_side(
    engine: Engine, texts: Iterator[Text], size: int
) -> Iterator[tuple[Text, RunningSequence]]:
    """Run lm-eval's requests (`texts`), `size` of them at a time, in one batch. Yield each text
    with each of its sequences that has ended. `text.next(batch)` starts the next sequence of a
    text, and returns None if there is none left."""
    batch, running = RunningBatch(engine), dict[RunningSequence, Text]()

    def go_on(text: Text) -> None:
        if (slot := text.next(batch)) is not None:
            running[slot] = text

    while True:
        while len(running) < size and (text := next(texts, None)) is not None:
            go_on(text)
        if not running:
            return
        for slot in batch.run():
            text = running.pop(slot)
            yield text, slot
            go_on(text)


class FreeAnswer:
    """Run one request for generated text: the model decodes freely after the prompt, until it ends
    the answer or a stop is met."""

    def __init__(
        self, engine: Engine, number: int, ids: Sequence[int], ending: Mapping[str, Any]
    ) -> None:
        """Take the request's `number`, the tokens of its prompt (`ids`) and the arguments of
        `Engine.join` that say how tokens are picked and when to stop (`ending`)."""
        self.engine, self.number, self._ending = engine, number, ending
        self._ids: Sequence[int] | None = ids

    def next(self, batch: RunningBatch) -> RunningSequence | None:
        ids, self._ids = self._ids, None
        return None if ids is None else self.engine.join(batch, torch.tensor([ids]), **self._ending)


def log_likelihood(slot: RunningSequence, uncounted: int = 0) -> float:
    """Return the log-likelihood, in nats, of the tokens that were fed to the sequence `slot` as its
    answer (`Forced`), without the first `uncounted`."""
    assert isinstance(slot.sampler, Forced)
    return -sum(float(cost) for cost in slot.sampler.costs[uncounted:])


class ScoredQuestion:
    """Compute the likelihoods of several continuations of one context, one after the other on one
    cache.

    All of the context but its last token is the prompt that the method seals. That token and the
    continuations are read by decode steps: otherwise the likelihood of a continuation's first token
    would come from the prefill, and be Full's under every method."""

    def __init__(
        self, engine: Engine, context: Sequence[int], continuations: Mapping[int, Sequence[int]]
    ) -> None:
        """`continuations`: the tokens of each, by the number of the request that asks for its
        likelihood."""
        self.engine, self.context = engine, context
        self._waiting = deque(continuations.items())
        self._room = max(map(len, continuations.values()))
        self._logits: Tensor | None = None  # [1 V], of the context's last token
        self.number = -1  # number of the request that runs

    @torch.inference_mode()
    def next(self, batch: RunningBatch) -> RunningSequence | None:
        if not self._waiting:
            return None
        self.number, continuation = self._waiting.popleft()
        whole = [*self.context, *continuation[:-1]]
        if self._logits is None or not self._cache.fits(len(whole)):
            self._logits = self._read(whole)
        else:
            self._snapshot.restore()
            self._cache.expect_text(torch.tensor([whole], device=self.engine.model.device))
        return _forced(batch, self._cache, self._logits, continuation)

    def _read(self, whole: Sequence[int]) -> Tensor:
        """Read the context and seal it. Return the logits [1 V] of its last token. `whole`: the
        text with the continuation, whose length may decide how the model rotates the context."""
        device = self.engine.model.device
        ids = torch.tensor([self.context], device=device)
        self._cache = self.engine.cache(ids, self._room)
        self._cache.expect_text(torch.tensor([whole], device=device))
        prompt, last = ids[:, :-1], ids[:, -1:]
        if prompt.shape[1]:
            self.engine.prefill(self._cache, prompt)
            self._cache.seal()
            logits = self.engine.decode(last, self._cache, None)
        else:  # the prompt would be empty
            logits = self.engine.prefill(self._cache, last)
            self._cache.seal()
        if self._waiting:
            self._snapshot = Snapshot(self._cache)
        return logits


class ScoredWindow:
    """Compute the likelihood of the last tokens of a text, each given all tokens before it.

    Its first `sealed` tokens are the prompt, whose likelihoods come from the prefill; the method
    seals them and the other tokens are read by decode steps."""

    def __init__(
        self, engine: Engine, number: int, tokens: Sequence[int], scored: int, sealed: int
    ) -> None:
        """Take the request's `number` and its `tokens`, of which the last `scored` count and the very
        last is not fed."""
        self.engine, self.number, self.scored, self.sealed = engine, number, scored, sealed
        self._tokens: Sequence[int] | None = tokens
        self._of_prompt = 0.0  # log-likelihood of the scored tokens in the prompt

    @torch.inference_mode()
    def next(self, batch: RunningBatch) -> RunningSequence | None:
        if self._tokens is None:
            return None
        tokens, self._tokens = torch.tensor([self._tokens], device=self.engine.model.device), None
        cache = self.engine.cache(tokens[:, :-1], 0)
        first = tokens.shape[1] - self.scored  # place of the first token that counts
        for start in range(0, self.sealed, CHUNK):
            end = min(start + CHUNK, self.sealed)
            logits = self._logits(cache, tokens[:, start:end])
            nexts = (
                tokens[:, start + 1 : end + 1] if end < self.sealed else tokens[:, start + 1 : end]
            )
            chances = (
                logits[:, : nexts.shape[1]]
                .float()
                .log_softmax(-1)
                .gather(-1, nexts.unsqueeze(-1))[0, :, 0]
            )
            self._of_prompt += float(chances[max(0, first - start - 1) :].double().sum())
        cache.seal()
        self._uncounted = max(0, first - self.sealed)
        return _forced(batch, cache, logits[:, -1], tokens[0, self.sealed :].tolist())

    def log_likelihood(self, slot: RunningSequence) -> float:
        """Return the log-likelihood of all scored tokens, in nats. `slot`: the sequence that has
        ended."""
        return self._of_prompt + log_likelihood(slot, self._uncounted)

    def _logits(self, cache: Any, ids: Tensor) -> Tensor:
        """Return the logits [1 T V] of all ids [1 T]; the engine gives only those of the last
        one."""
        places = cache.positions(ids.shape[1], ids.device)
        logits: Tensor = self.engine.model(
            ids, position_ids=places, past_key_values=cache, use_cache=True
        ).logits
        return logits


def _forced(
    batch: RunningBatch, cache: Any, logits: Tensor, tokens: Sequence[int]
) -> RunningSequence:
    """Add to `batch` a sequence whose answer is given: `tokens` are fed one by one to the sealed
    `cache`, whatever the model would choose, and their likelihoods are noted (`Forced`). logits
    [1 V]: those of the token before them."""
    return batch.join(
        cache,
        logits,
        torch.empty(1, 0, dtype=torch.long),
        began=perf_counter(),
        max_new_tokens=len(tokens),
        stops=[After(len(tokens))],
        sampler=Forced(torch.tensor([tokens])),
    )
