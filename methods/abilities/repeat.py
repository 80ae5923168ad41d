"""The second reading of a prompt: before the seal the model reads a complete prompt again, as if it
repeated it, and the method learns from that what to keep (KVzip, arXiv 2505.23416)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import sink_logits
from methods.base import Ability, AttnInput, KVLayer
from methods.layers.layer import Layer

BEFORE = 8  # last tokens of a piece, with which the question for the next one ends
WORDS = 40  # tokens that ask for a repetition, about


@dataclass(frozen=True, slots=True)
class RepeatPrompts:
    """Hold the token ids by which a model is asked to repeat its prompt. Without any, the prompt is
    repeated without being asked for."""

    head: tuple[int, ...] = ()  # what the chat template puts before a text, which is not repeated
    first: tuple[int, ...] = ()  # asks for the first piece of the text
    # asks for another piece; the last tokens of the piece before follow
    later: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()  # ends the question and opens the answer


class Piece(NamedTuple):
    """Name a piece of a prompt that the model is to repeat: the tokens from position `first` up to
    `end`. The tokens before position `head` belong to the chat template."""

    head: int
    first: int
    end: int


@dataclass(frozen=True)
class Repeat(Ability):
    """Have the model read its complete prompt again, in pieces of `chunk` tokens, before it is
    sealed. Layers store nothing of it. A policy that learns from it has a method `repeated(x, piece)`,
    which takes note of tokens that follow the complete prompt and end with a repetition of `piece`."""

    chunk: int

    def pieces(self, prompt: Tensor, prompts: RepeatPrompts) -> Iterator[tuple[Tensor, Piece]]:
        """Yield what the model reads after a complete prompt [B S]: token ids [B T], which end with
        a piece of the prompt, and the place of that piece."""
        like = prompt.new_tensor
        template = like(prompts.head[: prompt.shape[1] - 1])  # the last token is always repeated
        heads = (prompt[:, : len(template)] == template).cumprod(1).sum(1).tolist()
        if len({*heads}) > 1:
            raise ValueError(
                f"Rows begin with {heads} tokens of the chat template: give KVzip one prompt at a time."
            )
        head = heads[0]
        for first in range(head, prompt.shape[1], self.chunk):
            piece = prompt[:, first : first + self.chunk]
            asked = like(prompts.first if first == head else prompts.later).expand(len(prompt), -1)
            before = prompt[:, max(head, first - BEFORE) : first]
            answer = like(prompts.answer).expand(len(prompt), -1)
            yield (
                torch.cat([asked, before, answer, piece], 1),
                Piece(head, first, first + piece.shape[1]),
            )

    def tokens(self, sealed: int) -> int:
        """Return how many tokens the model reads at a time, at most, when it repeats a prompt of
        `sealed` tokens."""
        return min(self.chunk, sealed) + WORDS


def attend_again(layer: KVLayer, x: AttnInput, piece: Piece | None) -> Tensor:
    """Attend in `layer` from tokens that follow the complete prompt and end with a repetition of
    `piece` of it, to all that is stored and among themselves, and store nothing of them. Return
    [B H T D]. A layer that is no `Layer` does so in a method `repeat` of its own. `piece` None: the
    queries are another layer's, which borrows keys and values, and no policy learns from them."""
    if not isinstance(layer, Layer):
        repeat = getattr(layer, "repeat", None)
        if repeat is None:
            raise NotImplementedError(
                f"{type(layer).__name__} cannot see its prompt repeated: write `repeat`."
            )
        return repeat(x)
    for policy in layer.policies if piece is not None else ():
        if hasattr(policy, "repeated"):
            policy.repeated(x, piece)
    k, v = torch.cat([layer.store.k, x.k], 2), torch.cat([layer.store.v, x.v], 2)
    return sink_logits.causal_attention(x.q, k, v, layer.spec.scale, layer.spec.sink_logits)
