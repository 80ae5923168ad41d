"""Gives names to the tensors that hold keys and values of consecutive tokens, plain or encoded:
what a pool returns and what a store of conversations keeps.

In one layer `k` and `v` are rows as they are (`k` alone where values are channels of keys);
`codes0`, `codes1`, ... have a row per token and `ranges0`, ... a row per group of tokens that a codec
encoded together. The tokens that fill no group stay in `k` and `v`, after the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from methods.tiers.codec import Codec, Encoded, Plain

K, V, CODES, RANGES = "k", "v", "codes", "ranges"
FAR = "far"  # a part of the name of a tensor that lies away from the device and may stay there
Tensors = dict[str, Tensor]


class SplitRows:
    """Hold rows [..., tokens, width] of consecutive tokens as several tensors, one after the other,
    which may lie on different devices, or in tiers such as host memory."""

    def __init__(self, *parts: Tensor) -> None:
        self.parts = [part for part in parts if part.shape[-2]] or list(parts[:1])

    @property
    def like(self) -> Tensor:
        """Return a tensor without data (on the meta device) that has the shape, dtype and bytes of
        all rows together."""
        first = self.parts[0]
        shape = (*first.shape[:-2], sum(part.shape[-2] for part in self.parts), first.shape[-1])
        return torch.empty(shape, dtype=first.dtype, device="meta")

    def cut(self, start: int, end: int) -> SplitRows:
        """Return the rows of the tokens from `start` up to `end`, as views."""
        return SplitRows(
            *(part[..., max(0, start - at) : max(0, end - at), :] for at, part in self._placed())
        )

    def each(self, change: Callable[[Tensor, int], Tensor]) -> SplitRows:
        """Return `change` applied to every part, where it lies. Its second argument is the number
        of tokens before the part."""
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


def named(codec: Codec, encoded: Encoded, tail: Sequence[Tensor] = ()) -> Tensors:
    """Return a codec's tensors by name: those with a row per token, those with a row per group,
    and, as `k` and `v`, the `tail`: plain keys and values of later tokens that fill no group."""
    if isinstance(codec, Plain):
        return dict(zip((K, V), encoded.tokens, strict=False))
    kinds = ((CODES, encoded.tokens), (RANGES, encoded.blocks))
    written = {f"{kind}{place}": x for kind, tensors in kinds for place, x in enumerate(tensors)}
    return written | dict(zip((K, V), tail, strict=False))


def unnamed(codec: Codec, held: Mapping[str, Tensor]) -> tuple[Encoded, Sequence[Tensor]]:
    """Split a layer's tensors, whose names in `held` are those that `named` gives, into what the
    codec has encoded and the plain keys and values of later tokens. Missing names give no
    tensors."""
    tail = [held[name] for name in (K, V) if name in held]
    if isinstance(codec, Plain):
        return Encoded(tuple(tail)), []
    kinds = (
        [x for name, x in sorted(held.items()) if name.startswith(kind)] for kind in (CODES, RANGES)
    )
    return Encoded(*map(tuple, kinds)), tail


def tokens_in(held: Mapping[str, Tensor]) -> int:
    """Return how many tokens the tensors of a layer hold, by the names that `named` gives."""
    return sum(held[name].shape[2] for name in (f"{CODES}0", K) if name in held)


def stays_away(name: str) -> bool:
    """Return whether a tensor of this name lies away from the device and may stay there: a part of
    the name, between dots, is `far`."""
    return FAR in name.split(".")
