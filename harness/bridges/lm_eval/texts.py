"""Runs lm-evaluation-harness's requests as sequences of a running batch: answers, likelihoods,
whole windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from harness.engine.batch.running import RunningBatch
from harness.engine.batch.running_sequence import After, RunningSequence
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.saved_state import Snapshot
from harness.prompts.teacher import Forced

CHUNK = 512  # tokens of a window whose logits are computed at a time


class Asked(NamedTuple):
    """Name a sequence of a running batch and the request that it belongs to."""

    number: int  # of the request
    slot: RunningSequence
    of_prompt: float = 0.0  # log-likelihood of the tokens that count and stand in the prompt
    uncounted: int = 0  # how many of the tokens fed as its answer do not count

    def log_likelihood(self) -> float:
        """Return the log-likelihood, in nats, of the tokens that count. The sequence has ended."""
        assert isinstance(self.slot.sampler, Forced)
        costs = self.slot.sampler.costs[self.uncounted :]
        return self.of_prompt - sum(float(cost) for cost in costs)


# starts the sequences of one text in a batch, the next one each time the last one has ended
Text: TypeAlias = Callable[[RunningBatch], Iterator[Asked]]


def side_by_side(engine: Engine, texts: Iterator[Text], size: int) -> Iterator[Asked]:
    """Run lm-eval's requests (`texts`), `size` of them at a time, in one batch. Yield each of their
    sequences when it has ended."""
    batch = RunningBatch(engine)
    running: dict[RunningSequence, tuple[Asked, Iterator[Asked]]] = {}
    waiting = (text(batch) for text in texts)

    def go_on(text: Iterator[Asked]) -> None:
        if (asked := next(text, None)) is not None:
            running[asked.slot] = asked, text

    while True:
        while len(running) < size and (text := next(waiting, None)) is not None:
            go_on(text)
        if not running:
            return
        for slot in batch.run():
            asked, text = running.pop(slot)
            yield asked
            go_on(text)


def free_answer(
    engine: Engine, number: int, ids: Sequence[int], ending: Mapping[str, Any], batch: RunningBatch
) -> Iterator[Asked]:
    """Let the model decode freely after the prompt `ids`, until it ends the answer or a stop is met.
    `ending`: the arguments of `Engine.join` that say how tokens are picked and when to stop."""
    yield Asked(number, engine.join(batch, torch.tensor([ids]), **ending))


@torch.inference_mode()
def scored_question(
    engine: Engine,
    context: Sequence[int],
    continuations: Mapping[int, Sequence[int]],
    batch: RunningBatch,
) -> Iterator[Asked]:
    """Compute the likelihoods of several continuations of one context, one after the other on one
    cache. `continuations`: the tokens of each, by the number of the request that asks for its
    likelihood.

    All of the context but its last token is the prompt that the method seals. That token and the
    continuations are read by decode steps: otherwise the likelihood of a continuation's first token
    would come from the prefill, and be Full's under every method."""
    room = max(map(len, continuations.values()))
    last = list(continuations)[-1]
    cache: KVCache | None = None
    for number, continuation in continuations.items():
        # its length may decide how the model rotates the context
        whole = torch.tensor([[*context, *continuation[:-1]]], device=engine.model.device)
        if cache is None or not cache.fits(whole.shape[1]):
            cache = engine.cache(whole[:, : len(context)], room)
            cache.fed.set(whole)
            logits = read_context(engine, cache, whole[:, : len(context)])
            if number != last:
                snapshot = Snapshot(cache)
        else:
            snapshot.restore()
            cache.fed.set(whole)
        yield Asked(number, _forced(batch, cache, logits, continuation))


def read_context(engine: Engine, cache: KVCache, ids: Tensor) -> Tensor:
    """Read the context ids [1 S] and seal it before its last token. Return the logits [1 V] of that
    token."""
    prompt, last = ids[:, :-1], ids[:, -1:]
    if prompt.shape[1]:
        engine.prefill(cache, prompt)
        cache.seal()
        return engine.decode(last, cache, None)
    logits = engine.prefill(cache, last)  # the prompt would be empty
    cache.seal()
    return logits


@torch.inference_mode()
def scored_window(
    engine: Engine,
    number: int,
    window: Sequence[int],
    scored: int,
    sealed: int,
    batch: RunningBatch,
) -> Iterator[Asked]:
    """Compute the likelihood of the last `scored` tokens of a window of a text, each given all tokens
    before it; the very last token is not fed.

    The first `sealed` tokens are the prompt, whose likelihoods come from the prefill; the method
    seals them and the other tokens are read by decode steps."""
    tokens = torch.tensor([window], device=engine.model.device)
    cache = engine.cache(tokens[:, :-1], 0)
    first = len(window) - scored  # place of the first token that counts
    of_prompt = 0.0
    for start in range(0, sealed, CHUNK):
        end = min(start + CHUNK, sealed)
        places = cache.positions(end - start, tokens.device)
        # the engine gives only the logits of the last token
        logits = engine.model(
            tokens[:, start:end], position_ids=places, past_key_values=cache, use_cache=True
        ).logits
        nexts = tokens[0, start + 1 : min(end + 1, sealed)]
        chances = logits[0, : len(nexts)].float().log_softmax(-1).gather(-1, nexts.unsqueeze(-1))
        of_prompt += float(chances[max(0, first - start - 1) :].double().sum())
    cache.seal()
    slot = _forced(batch, cache, logits[:, -1], window[sealed:])
    yield Asked(number, slot, of_prompt, max(0, first - sealed))


def _forced(
    batch: RunningBatch, cache: KVCache, logits: Tensor, tokens: Sequence[int]
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
