"""Defines how keys and values are encoded: as they are, or in fewer bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import ops
from kernels.coded import Codes
from kernels.reference import Segment


class Encoded(NamedTuple):
    """Hold keys and values as a codec writes them: tensors with a row per token, and tensors with a
    row per block of tokens. Every tensor is [B G rows width]."""

    tokens: tuple[Tensor, ...]
    blocks: tuple[Tensor, ...] = ()


class Layout(NamedTuple):
    """Say width and dtype of each tensor of an `Encoded`."""

    tokens: tuple[tuple[int, torch.dtype], ...]
    blocks: tuple[tuple[int, torch.dtype], ...] = ()

    @property
    def token_bytes(self) -> int:
        """Return the bytes that one head writes per token."""
        return sum(width * dtype.itemsize for width, dtype in self.tokens)

    @property
    def block_bytes(self) -> int:
        """Return the additional bytes that one head writes per block."""
        return sum(width * dtype.itemsize for width, dtype in self.blocks)


class Codec(ABC):
    """Encode whole blocks of tokens, and decode them token by token. A codec is a value, as a
    method is: a frozen dataclass."""

    @property
    @abstractmethod
    def block(self) -> int:
        """Return how many tokens are encoded together."""

    @abstractmethod
    def check(self, head_dim: int) -> None:
        """Raise `ValueError` if the codec does not support the head size."""

    @abstractmethod
    def layout(self, head_dim: int, dtype: torch.dtype) -> Layout:
        """Return the layout of `encode` for keys and values of `head_dim` channels in `dtype`."""

    @abstractmethod
    def encode(self, k: Tensor, v: Tensor) -> Encoded:
        """Encode whole blocks of tokens. k, v [B G n*block D]"""

    @abstractmethod
    def decode(self, stored: Encoded, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return decoded tokens k, v [... D]. Tensors have the same leading dimensions, or ones
        that broadcast: those of `blocks` hold the row of each token's block."""

    def decode_rows(
        self, stored: Encoded, rows: Tensor | None, blocks: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return chosen tokens of each head, decoded, k, v [B G K D]. rows [B G K], or None for all
        that `tokens` holds; blocks [B G K]: the rows of `blocks` that belong to them."""
        tokens = stored.tokens if rows is None else tuple(ops.gather_rows(x, rows) for x in stored.tokens)
        return self.decode(Encoded(tokens, tuple(ops.gather_rows(x, blocks) for x in stored.blocks)), dtype)

    def segment(self, stored: Encoded, dtype: torch.dtype) -> Segment | Codes:
        """Return what a step attends to of all encoded tokens: codes, if kernels read them."""
        return Segment(*self.decode_whole(stored, dtype))

    def decode_whole(self, stored: Encoded, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return all encoded tokens, decoded, k, v [B G n*block D]."""
        tokens = tuple(x.unflatten(2, (-1, self.block)) for x in stored.tokens)
        k, v = self.decode(Encoded(tokens, tuple(x.unsqueeze(3) for x in stored.blocks)), dtype)
        return k.flatten(2, 3), v.flatten(2, 3)


@dataclass(frozen=True)
class Plain(Codec):
    """Keep keys and values as they are."""

    @property
    def block(self) -> int:
        return 1

    def check(self, head_dim: int) -> None:
        """Accept every head size."""

    def layout(self, head_dim: int, dtype: torch.dtype) -> Layout:
        return Layout(((head_dim, dtype),) * 2)

    def encode(self, k: Tensor, v: Tensor) -> Encoded:
        return Encoded((k, v))

    def decode(self, stored: Encoded, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k, v = stored.tokens
        return k, v


PLAIN = Plain()
