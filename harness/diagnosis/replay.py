"""Answers one prompt again under a method, followed by a probe, with what its layers read left alone or changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from harness.diagnosis.probe import Probe, Reads
from harness.engine.attach import Attachment
from harness.engine.engine import Engine
from harness.engine.saved_state import Snapshot

AnswerEnding = Callable[[int], dict[str, Any]]  # new tokens at most -> how `Engine.complete` picks tokens and stops


class Replayed(NamedTuple):
    """`held` and `mass` as in `Probe.shares`: a column per token of the answer from token `first` (1 or 2) on."""

    tokens: list[int]
    first: int
    held: list[list[float]]
    mass: list[list[float]]
    evicts: bool


@dataclass(frozen=True)
class Replay:
    """One prompt; `context`: tokens that are sealed, what follows is decoded (protocol=context)."""

    ids: Sequence[int]
    context: int
    needle: Sequence[int]
    ending: AnswerEnding
    new_tokens: int
    prefill_chunk: int | None = None

    def under(self, attachment: Attachment, more: int = 0) -> Sealed:
        """`more`: tokens that an answer may have on top of `new_tokens`."""
        return Sealed(self, attachment, more)


class Sealed:
    """A prompt that was prefilled and sealed once, and is answered again and again."""

    @torch.inference_mode()
    def __init__(self, given: Replay, attachment: Attachment, more: int) -> None:
        self.given = given
        self.engine = Engine(attachment, prefill_chunk=given.prefill_chunk)
        self.prompt = torch.tensor([list(given.ids)], device=attachment.model.device)
        self.cache = attachment.start(Probe, capacity=len(given.ids) + given.new_tokens + more)
        self.logits = self.engine.prefill(self.cache, self.prompt[:, : given.context], whole=True)
        self.cache.seal()
        self._before = Snapshot(self.cache)

    @torch.inference_mode()
    def answer(self, reads: Reads = "own", more: int = 0) -> Replayed:
        """`more`: tokens on top of `new_tokens`, as many as there is room for."""
        given, cache = self.given, self.cache
        self._before.restore()
        cache.follow(given.needle, reads)
        question = self.prompt[:, given.context :]
        made = self.engine.complete(cache, self.logits, question, began=0.0, **given.ending(given.new_tokens + more))
        tokens, asked = made.tokens[0], bool(question.shape[1])
        steps = len(tokens) - (0 if asked else 1)  # behind a question the first token comes from a step as well
        held, mass = (cache.shares(name, steps) for name in ("held", "mass"))
        return Replayed(tokens, 1 if asked else 2, held, mass, any(layer.evicts for layer in cache.method_layers))
