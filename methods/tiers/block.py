"""Names keys and values of consecutive tokens as they are encoded: what a pool returns and what a
store keeps.

In one layer `k` and `v` are rows as they are; `codes0`, `codes1`, ... have a row per token and
`ranges0`, ... a row per group of tokens that a codec encoded together. The tokens that fill no
group stay in `k` and `v`, after the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.tiers.codec import PLAIN, Codec, Encoded

K, V, CODES, RANGES = "k", "v", "codes", "ranges"
FAR = "far"  # a part of the name of a tensor that lies away from the device and may stay there
Tensors = dict[str, Tensor]


class SplitRows:
    """Hold rows [..., tokens, width] of consecutive tokens, parts of which may lie in different
    tiers."""

    def __init__(self, *parts: Tensor) -> None:
        self.parts = [part for part in parts if part.shape[-2]] or list(parts[:1])

    @property
    def like(self) -> Tensor:
        """Return a tensor of the meta device with the rows' shape, dtype and bytes."""
        first = self.parts[0]
        shape = (*first.shape[:-2], sum(part.shape[-2] for part in self.parts), first.shape[-1])
        return torch.empty(shape, dtype=first.dtype, device="meta")

    def cut(self, start: int, end: int) -> SplitRows:
        """Return the tokens from `start` to `end`, as views."""
        return SplitRows(*(part[..., max(0, start - at) : max(0, end - at), :] for at, part in self._placed()))

    def each(self, change: Callable[[Tensor, int], Tensor]) -> SplitRows:
        """Apply `change` to every part where it lies, with the number of tokens before it. Return
        the result."""
        return SplitRows(*(change(part, at) for at, part in self._placed()))

    def joined(self) -> Tensor:
        """Return the rows as one tensor: a view of a single part, else a copy in host memory."""
        if len(self.parts) == 1:
            return self.parts[0]
        whole = torch.empty_like(self.like, device="cpu")
        for at, part in self._placed():
            whole[..., at : at + part.shape[-2], :] = part
        return whole

    def _placed(self) -> Iterator[tuple[int, Tensor]]:
        at = 0
        for part in self.parts:
            yield at, part
            at += part.shape[-2]


@dataclass(frozen=True, slots=True)
class Format:
    """Say how blocks of tokens are encoded: rows named `LAYER.k` and `LAYER.v` [B G T D] by a
    codec; without one any rows as they are. `dtype`: the dtype after decoding. Tokens of different
    blocks are never encoded together."""

    codec: Codec = PLAIN
    dtype: torch.dtype = torch.float32

    def like(self, rows: Tensors) -> Tensors:
        """Return names, shapes and dtypes of the result of `encode` for such rows, as tensors of
        the meta device."""
        if self.codec == PLAIN:
            return {name: torch.empty_like(x, device="meta") for name, x in rows.items()}
        return {name: x for layer in _layers(rows) for name, x in self._like(layer, rows[f"{layer}.{K}"])}

    def encode(self, rows: Tensors) -> Tensors:
        """Encode rows by the codec, under their new names."""
        if self.codec == PLAIN:
            return rows
        return {name: x for layer in _layers(rows) for name, x in self._encoded(layer, rows)}

    def decode(self, rows: Tensors) -> Tensors:
        """Return the rows that `encode` was given, up to the codec's error."""
        if self.codec == PLAIN:
            return rows
        return {name: x for layer in _layers(rows) for name, x in self._decoded(layer, rows)}

    def _encoded(self, layer: str, rows: Tensors) -> Iterator[tuple[str, Tensor]]:
        k, v = rows[f"{layer}.{K}"], rows[f"{layer}.{V}"]
        whole = k.shape[2] - k.shape[2] % self.codec.block
        encoded = self.codec.encode(k[:, :, :whole], v[:, :, :whole]) if whole else Encoded(())
        tail = [k[:, :, whole:], v[:, :, whole:]] if whole < k.shape[2] else []
        yield from ((f"{layer}.{name}", x) for name, x in named(self.codec, encoded, tail).items())

    def _like(self, layer: str, k: Tensor) -> Iterator[tuple[str, Tensor]]:
        groups, tail = divmod(k.shape[2], self.codec.block)
        if groups:
            layout = self.codec.layout(k.shape[3], k.dtype)
            for kind, count, parts in ((CODES, k.shape[2] - tail, layout.tokens), (RANGES, groups, layout.blocks)):
                for place, (width, dtype) in enumerate(parts):
                    yield f"{layer}.{kind}{place}", torch.empty(*k.shape[:2], count, width, dtype=dtype, device="meta")
        if tail:
            yield from ((f"{layer}.{name}", torch.empty_like(k[:, :, :tail], device="meta")) for name in (K, V))

    def _decoded(self, layer: str, rows: Tensors) -> Iterator[tuple[str, Tensor]]:
        held = {name.partition(".")[2]: x for name, x in rows.items() if name.startswith(f"{layer}.")}
        encoded, tail = unnamed(self.codec, held)
        parts = [self.codec.decode_whole(encoded, self.dtype)] if encoded.tokens else []
        for name, *whole in zip((K, V), *parts, *([tail] if tail else []), strict=True):
            yield f"{layer}.{name}", torch.cat(whole, 2)


def named(codec: Codec, encoded: Encoded, tail: Sequence[Tensor] = ()) -> Tensors:
    """Return what a codec wrote, and K and V of later tokens that fill no group, by name."""
    if codec == PLAIN:
        return dict(zip((K, V), encoded.tokens, strict=True))
    kinds = ((CODES, encoded.tokens), (RANGES, encoded.blocks))
    written = {f"{kind}{place}": x for kind, tensors in kinds for place, x in enumerate(tensors)}
    return written | dict(zip((K, V), tail, strict=False))


def unnamed(codec: Codec, held: Mapping[str, Tensor]) -> tuple[Encoded, Sequence[Tensor]]:
    """Return what `named` was given, without tensors if there was nothing."""
    tail = [held[name] for name in (K, V) if name in held]
    if codec == PLAIN:
        return Encoded(tuple(tail)), []
    kinds = ([x for name, x in sorted(held.items()) if name.startswith(kind)] for kind in (CODES, RANGES))
    return Encoded(*map(tuple, kinds)), tail


def tokens_in(held: Mapping[str, Tensor]) -> int:
    """Return how many tokens `named` was given."""
    return sum(held[name].shape[2] for name in (f"{CODES}0", K) if name in held)


def stays_away(name: str) -> bool:
    """Return whether a tensor of this name lies away from the device."""
    return FAR in name.split(".")


def _layers(rows: Tensors) -> Sequence[str]:
    return list(dict.fromkeys(name.partition(".")[0] for name in rows))
