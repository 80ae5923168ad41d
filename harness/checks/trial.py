"""Runs a method on a small model and notes what is seen of it from outside, for the checks of its contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.loop import LoopCache
from methods.abilities import ability
from methods.abilities.bounded_answer import CountedAnswer
from methods.base import AttnInput, Budget, Method
from methods.full import Full
from methods.layers.returned import unchanged, unwritten
from methods.tiers.tier import DEVICE

BUDGET = 0.4  # of the prompt, where a check needs no other
LEAST, SPARE = 83, 9  # tokens of a prompt; tokens that the budget has beyond sinks and windows
STEPS = 5
WINDOWS = 1024  # a whole number among the parameters up to here may be a window
TOLERANCE = 1e-3  # of logits; a token more or less that is read shows in the second digit


class Broken(ValueError):
    """Report that a method does not keep its contract; the message says what was seen."""


class DoesNotApply(Exception):
    """Say why a check has nothing to look at in this method."""


class Step(NamedTuple):
    """Hold what is seen of one decode step from outside."""

    logits: Tensor  # [B V], of the next token
    attended: Sequence[tuple[float, float]]  # tokens of prompt and answer that were read, per layer
    read: list[Tensor | None]  # positions that were read, per layer


class WatchedCache(LoopCache):
    """Raise an error when attention comes out as NaN, or a layer changes in place what others read
    after it: the tensors that it is given, and the rows that it has stored when it seals. Steps are
    watched by every cache."""

    def attend(self, layer: int, x: AttnInput) -> Tensor:
        with unchanged(self.layers[layer], x):
            out = super().attend(layer, x)
        if not out.isfinite().all():
            raise Broken(
                f"In layer {layer}, attention came out as NaN or infinite: look for what the method writes or divides"
            )
        return out

    def close(self, layer: int) -> None:
        why = "copies of the cache, which share these rows, would change with them"
        with unwritten(self.layers[layer], "the seal", why):
            super().close(layer)


class Trial:
    """Hold a method, a model that it is tried on, and the runs that several checks look at.

    `length`: tokens of the usual prompt; by default as many as leave the budget room beyond the
    sinks and windows that the method states or has among its parameters. `seed` draws the
    prompts."""

    def __init__(
        self, method: Method, model: Any, length: int | None = None, seed: int = 0
    ) -> None:
        self.method, self.model, self.seed = method, model, seed
        self.length = length or usual_length(method)
        counted = ability(method, CountedAnswer)
        # so many that rows go while the answer grows, where the method lets them
        self.new = STEPS + (counted.extra_rows if counted else 0)

    def prompt(self, length: int | None = None, batch: int = 1, seed: int = 0) -> Tensor:
        """Return random token ids [batch length], no special ones."""
        draw = torch.Generator().manual_seed(self.seed * 1000 + seed)
        vocabulary = self.model.config.vocab_size
        return torch.randint(3, vocabulary, (batch, length or self.length), generator=draw)

    def attach(
        self, budget: float | Budget | None = BUDGET, *, model: Any = None, **how: Any
    ) -> AbstractContextManager[Attachment]:
        """Attach the method to its model, or to `model`. `how`: other keywords of `attached`."""
        calibration = self.prompt(max(64, self.method.calibration_tokens), seed=9)
        return attached(
            model or self.model, self.method, budget=budget, calibration=calibration, **how
        )

    def run(
        self, ids: Tensor, budget: float | None = BUDGET, *, chunk: int | None = None, **how: Any
    ) -> list[Step]:
        """Answer the prompts ids [B S], fed in pieces of `chunk` tokens."""
        with self.attach(budget, **how) as kv:
            cache = watched(kv, ids.shape[1] + self.new + 3, len(ids))
            return turn(kv, cache, ids, self.new, chunk)

    @cached_property
    def usual(self) -> list[Step]:
        """Return the steps of the answer to the usual prompt under the usual budget."""
        return self.run(self.prompt())

    def full(self, ids: Tensor) -> list[Step]:
        """Return the steps with which Full answers ids [B S]."""
        with attached(self.model, Full()) as kv:
            return turn(kv, watched(kv, ids.shape[1] + self.new + 3, len(ids)), ids, self.new)

    def places(self) -> list[str]:
        """Return where the method can keep what a step reads only by choice."""
        return [DEVICE, "host"] if self.method.offloads else [DEVICE]


def usual_length(method: Method) -> int:
    """Return how many tokens of prompt leave the usual budget room beyond the sinks and windows
    that `method` states (`smallest_budget`) or may have among its parameters."""
    numbers = [x for x in vars(method).values() if type(x) is int and x <= WINDOWS]
    needed = ceil((method.smallest_budget + SPARE) / BUDGET)
    return max(LEAST, needed, 3 * max(numbers, default=0))


def watched(kv: Attachment, capacity: int, batch: int = 1) -> WatchedCache:
    """Return a fresh cache of `kv` that notices what is changed in place."""
    return kv.start(WatchedCache, capacity=capacity, batch=batch)


@torch.inference_mode()
def turn(
    kv: Attachment, cache: KVCache, ids: Tensor, steps: int = STEPS, chunk: int | None = None
) -> list[Step]:
    """Prefill ids [B S] in pieces of `chunk` tokens, seal, and decode greedily. Return the steps;
    the token that the prefill chose is fed to the first."""
    if cache.sealed:
        cache.open_turn()
    for part in ids.split(chunk or ids.shape[1], 1):
        output = kv.model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.seal()
    return decoded(kv, cache, output.logits[:, -1], steps)


@torch.inference_mode()
def decoded(kv: Attachment, cache: KVCache, logits: Tensor, steps: int) -> list[Step]:
    """Decode greedily in a sealed cache, from the logits [B V] of the last token."""
    seen = []
    for _ in range(steps):
        best = logits.argmax(-1, keepdim=True)
        logits = kv.model(best, past_key_values=cache, use_cache=True).logits[:, -1]
        attended = [layer.attended for layer in cache.layers]
        seen.append(Step(logits, attended, [layer.read_positions() for layer in cache.layers]))
    return seen


def difference(steps: Sequence[Step], wanted: Sequence[Step]) -> str | None:
    """Return in words where the logits of two answers first differ by more than rounding; None if
    they do not. With the logits of all steps the tokens are compared, too."""
    for count, (step, one) in enumerate(zip(steps, wanted, strict=True), 2):
        if not torch.allclose(step.logits, one.logits, rtol=TOLERANCE, atol=TOLERANCE):
            apart = float((step.logits - one.logits).abs().max())
            tokens = [x.logits.argmax(-1).tolist() for x in (step, one)]
            chosen = "" if tokens[0] == tokens[1] else f": {tokens[0]} and not {tokens[1]}"
            return f"at token {count}{chosen} (logits differ by {apart:.2g})"
    return None


@contextmanager
def fresh_memory_full_of_nan() -> Iterator[None]:
    """Let torch fill new memory with NaN inside the block, as it does for those who want the same
    results each time."""
    usual = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert bool(torch.empty(3).isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(usual)
