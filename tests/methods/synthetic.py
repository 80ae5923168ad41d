"""Random sequences for driving the layers of a method without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kernels.rope import rotate
from methods.abilities import asked
from methods.base import Ability, AttnInput, Budget, CacheState, KVLayer, LayerSpec, Method, Request

WIDTH = 48  # of the model


@dataclass(frozen=True)
class Shape:
    heads: int
    groups: int
    dim: int
    batch: int = 1


SHAPES = [Shape(4, 4, 64), Shape(6, 2, 96, batch=2), Shape(4, 1, 128)]  # MHA, GQA, MQA


def rope(dim: int, stretch: float = 1.0, shift: int = 0) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """positions [P] -> cos, sin [1 P D], half-split layout; `stretch` as YaRN's attention factor."""

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        turns = (positions.double() + shift)[:, None] * 10000 ** (-torch.arange(0, dim, 2).double() / dim)
        both = torch.cat([turns, turns], -1)
        return (both.cos() * stretch).float()[None], (both.sin() * stretch).float()[None]

    return angles


class Sequences:
    """One batch of random tokens through `layers` unconnected attention layers."""

    def __init__(self, shape: Shape, length: int, layers: int = 1, stretch: float = 1.0, shift: int = 0) -> None:
        self.shape, self.length = shape, length
        draw = torch.Generator().manual_seed(shape.heads * 1000 + length)
        size = (layers, shape.batch)
        self.hidden = torch.randn(*size, length, WIDTH, generator=draw)
        self.weight = torch.randn(layers, WIDTH, shape.heads * shape.dim, generator=draw) / WIDTH**0.5
        self.raw_k = torch.randn(*size, shape.groups, length, shape.dim, generator=draw)
        self.v = torch.randn(*size, shape.groups, length, shape.dim, generator=draw)
        self.rope = rope(shape.dim, stretch, shift)
        self.cos, self.sin = self.rope(torch.arange(length))

    def sharpened(self, factor: float) -> Self:
        """The first query head of every group is so many times as decided as the others."""
        self.weight.unflatten(2, (self.shape.groups, -1, self.shape.dim))[:, :, :, 0] *= factor
        return self

    def project(self, layer: int, hidden: Tensor) -> Tensor:
        """[B T E] -> [B H T D], not rotated"""
        return (hidden @ self.weight[layer]).unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)

    @property
    def specs(self) -> list[LayerSpec]:
        count = len(self.hidden)
        shape = self.shape
        return [
            LayerSpec(
                index=i,
                num_layers=count,
                num_heads=shape.heads,
                num_kv_heads=shape.groups,
                head_dim=shape.dim,
                scale=shape.dim**-0.5,
                rope=self.rope,
                project_query=lambda hidden, i=i: self.project(i, hidden),
            )
            for i in range(count)
        ]

    def q(self, layer: int) -> Tensor:
        return rotate(self.project(layer, self.hidden[layer]), self.cos, self.sin)

    def k(self, layer: int) -> Tensor:
        return rotate(self.raw_k[layer], self.cos, self.sin)

    def at(self, layer: int, start: int, end: int) -> AttnInput:
        """What an attention call of these tokens sees."""
        q, k = (x[:, :, start:end] for x in (self.q(layer), self.k(layer)))
        cos, sin = self.cos[:, start:end], self.sin[:, start:end]
        return AttnInput(q, k, self.v[layer][:, :, start:end], cos, sin, self.hidden[layer][:, start:end], start)

    def request(
        self,
        budget: int | float | Budget | None,
        placement: str = "device",
        prepared: object = None,
        reuse_steps: int = 0,
        abilities: tuple[Ability, ...] = (),
    ) -> Request:
        return Request(
            batch=self.shape.batch,
            capacity=self.length,
            dtype=torch.float32,
            device=torch.device("cpu"),
            budget=(given := Budget(budget) if isinstance(budget, (int, float)) else budget),
            abilities=(*asked(given), *abilities),
            placement=placement,
            prepared=prepared,
            reuse_steps=reuse_steps,
        )

    def start(self, method: Method, budget: int | float | Budget | None, **more: object) -> list[KVLayer]:
        return method.start(self.specs, CacheState(self.request(budget, **more)))  # type: ignore[arg-type]

    def prefill(self, layers: Sequence[KVLayer], start: int, end: int, *, chunk: int | None = None) -> list[Tensor]:
        """All layers take in tokens start..end-1 as prompt. -> the outputs of each layer"""
        outs = [
            [layer.prefill(self.at(i, a, min(a + (chunk or end), end))) for i, layer in enumerate(layers)]
            for a in range(start, end, chunk or end)
        ]
        return [torch.cat(parts, 2) for parts in zip(*outs, strict=True)]

    def seal(self, layers: Sequence[KVLayer], start: int, end: int) -> None:
        self.prefill(layers, start, end)
        for layer in layers:
            layer.seal()

    def decode(self, layers: Sequence[KVLayer], position: int) -> list[Tensor]:
        return [layer.decode(self.at(i, position, position + 1)) for i, layer in enumerate(layers)]


def attention(q: Tensor, k: Tensor, v: Tensor, positions: list[list[list[int]]], scale: float) -> Tensor:
    """Exact attention of one token over a set of positions per sequence and KV head, by loops. q [B H 1 D]"""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            at = positions[b][h // group]
            assert len(set(at)) == len(at), "a token is read twice"
            weights = (k[b, h // group, at] @ q[b, h, 0] * scale).softmax(0)
            out[b, h, 0] = weights @ v[b, h // group, at]
    return out


def assert_best(chosen: Tensor, scores: Tensor, count: int) -> None:
    """`chosen` [... K] are the `count` best of `scores` [... S], as a set; any of those equal up to rounding."""
    assert chosen.shape[-1] == count
    taken = torch.zeros(scores.shape).scatter_(-1, chosen, 1.0).bool()
    assert bool((taken.sum(-1) == count).all()), "a token was chosen twice"
    least = scores.topk(count).values[..., -1:]
    slack = 1e-5 * scores.abs().amax(-1, keepdim=True)
    assert bool((scores[taken] >= (least - slack).expand_as(scores)[taken]).all())
    assert bool(taken[scores > least + slack].all())
