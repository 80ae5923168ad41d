"""Stored rows in few bits: a block's keys, as they are before rotation, and values, as codes with their ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.history.block import Rows
from methods.base import LayerSpec
from methods.tiers.codec import Codec, Encoded

TOKENS, GROUPS = "codes", "ranges"  # tensors with a row per token, and per group of tokens
K, V = "k", "v"


@dataclass(frozen=True)
class IntCoding:
    """Of rows `LAYER.k` and `LAYER.v` [1 G T D]. The last tokens of a block that do not fill a group stay as they are;
    they are never encoded together with those of the next block."""

    codec: Codec
    dtype: torch.dtype

    def check(self, specs: Sequence[LayerSpec]) -> None:
        """Raises ValueError where a head size does not suit."""
        for spec in specs:
            self.codec.check(spec.head_dim)

    def like(self, rows: Rows) -> Rows:
        return {name: x for layer in _layers(rows) for name, x in self._like(layer, rows)}

    def encode(self, rows: Rows) -> Rows:
        return {name: x for layer in _layers(rows) for name, x in self._encoded(layer, rows)}

    def decode(self, rows: Rows) -> Rows:
        made: Rows = {}
        for layer in _layers(rows):
            parts = [self._decoded(layer, rows)] if f"{layer}.{TOKENS}0" in rows else []
            if f"{layer}.{K}" in rows:
                parts.append((rows[f"{layer}.{K}"], rows[f"{layer}.{V}"]))
            keys, values = zip(*parts, strict=True)
            made |= {f"{layer}.{K}": torch.cat(keys, 2), f"{layer}.{V}": torch.cat(values, 2)}
        return made

    def _encoded(self, layer: str, rows: Rows) -> Iterator[tuple[str, Tensor]]:
        k, v = rows[f"{layer}.{K}"], rows[f"{layer}.{V}"]
        whole = k.shape[2] - k.shape[2] % self.codec.block
        if whole:
            found = self.codec.encode(k[:, :, :whole], v[:, :, :whole])
            for kind, tensors in ((TOKENS, found.tokens), (GROUPS, found.blocks)):
                yield from ((f"{layer}.{kind}{place}", x) for place, x in enumerate(tensors))
        if whole < k.shape[2]:
            yield from ((f"{layer}.{name}", x[:, :, whole:]) for name, x in ((K, k), (V, v)))

    def _like(self, layer: str, rows: Rows) -> Iterator[tuple[str, Tensor]]:
        k = rows[f"{layer}.{K}"]
        blocks, tail = divmod(k.shape[2], self.codec.block)
        if blocks:
            layout = self.codec.layout(k.shape[3], k.dtype)
            for kind, count, parts in ((TOKENS, k.shape[2] - tail, layout.tokens), (GROUPS, blocks, layout.blocks)):
                for place, (width, dtype) in enumerate(parts):
                    yield f"{layer}.{kind}{place}", torch.empty(*k.shape[:2], count, width, dtype=dtype, device="meta")
        if tail:
            yield from ((f"{layer}.{name}", torch.empty_like(k[:, :, :tail], device="meta")) for name in (K, V))

    def _decoded(self, layer: str, rows: Rows) -> tuple[Tensor, Tensor]:
        tokens = [x.unflatten(2, (-1, self.codec.block)) for x in _numbered(layer, TOKENS, rows)]
        groups = [x.unsqueeze(3) for x in _numbered(layer, GROUPS, rows)]
        k, v = self.codec.decode(Encoded(tuple(tokens), tuple(groups)), self.dtype)
        return k.flatten(2, 3), v.flatten(2, 3)


def _layers(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in rows))


def _numbered(layer: str, kind: str, rows: Rows) -> list[Tensor]:
    return [x for name, x in sorted(rows.items()) if name.startswith(f"{layer}.{kind}")]
