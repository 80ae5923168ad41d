"""Attention layers without a model: their specs, random inputs, and prompts of random keys and
values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.matmul import matmul
from methods.abilities import ability
from methods.abilities.repeat import Piece, Repeat, attend_again
from methods.base import AttnInput, KVLayer, LayerSpec
from methods.layers import Layer

CHUNK = 8192  # tokens taken in at a time
QUERIES = 64  # of a chunk, its last: enough for every window, and column sums stay affordable
WIDTH = 64  # of the hidden state, which only InfiniGen's guess projects

Rope = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LayerShape:
    """The shape of the attention layers of an imagined model, which makes random inputs for
    them."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    layers: int = 5

    def specs(self) -> list[LayerSpec]:
        return [self._spec(index) for index in range(self.layers)]

    def _spec(self, index: int) -> LayerSpec:
        weight = _random(index, (WIDTH, self.heads * self.head_dim), self) * WIDTH**-0.5

        def project(hidden: Tensor) -> Tensor:
            return matmul(hidden, weight).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

        scale = self.head_dim**-0.5
        return LayerSpec(
            index, self.layers, self.heads, self.kv_heads, self.head_dim, scale, self.rope, project
        )

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [1 P D] of the rotary embedding at positions [P]."""
        channels = torch.arange(0, self.head_dim, 2, device=self.device, dtype=torch.float32)
        turns = positions.to(self.device).float()[:, None] * 500_000.0 ** (
            -channels / self.head_dim
        )
        both = torch.cat([turns, turns], -1).unsqueeze(0)
        return both.cos().to(self.dtype), both.sin().to(self.dtype)

    def token(self, seed: int, position: int) -> AttnInput:
        """Return the attention input of one new random token at this position; `seed` determines
        it."""
        return self._input(seed, position, 1, 1, self.rope)

    def _input(self, seed: int, start: int, count: int, queries: int, rope: Rope) -> AttnInput:
        q = _random(seed, (1, self.heads, queries, self.head_dim), self)
        k, v = _random(seed + 1, (2, 1, self.kv_heads, count, self.head_dim), self)
        cos, sin = (turn.to(self.dtype) for turn in rope(torch.arange(start, start + count)))
        return AttnInput(q, k, v, cos, sin, _random(seed + 2, (1, queries, WIDTH), self), start)

    def fill(self, layers: Sequence[KVLayer], tokens: int, attending: bool = False) -> None:
        """Feed the same `tokens` random prompt tokens to each layer. With `attending`, the layer's
        own prefill runs, for methods whose prefill is not dense; otherwise it only absorbs keys and
        values. A method that has the model repeat its prompt sees a few random queries that repeat all
        of it."""
        for start in range(0, tokens, CHUNK):
            count = min(CHUNK, tokens - start)
            x = self._input(
                start,
                start,
                count,
                count if attending else min(count, QUERIES),
                layers[0].spec.rope,
            )
            for layer in layers:
                layer.prefill(x) if attending else layer.absorb(x)
        for layer in layers:
            if isinstance(layer, Layer) and ability(layer.method, Repeat):
                attend_again(
                    layer,
                    self._input(tokens, tokens, QUERIES, QUERIES, layer.spec.rope),
                    Piece(0, 0, tokens),
                )

    def observe(self) -> Callable[[int], Iterator[AttnInput]]:
        """Return a function from a number of tokens to random attention inputs, one per layer. It
        stands in for the observation of a real model in `Method.prepare`, by which methods
        calibrate themselves."""
        return lambda tokens: (
            self._input(7 * index, 0, tokens, tokens, self.rope) for index in range(self.layers)
        )


def _random(seed: int, shape: tuple[int, ...], like: LayerShape) -> Tensor:
    draw = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(shape, generator=draw, device=like.device).to(like.dtype)
