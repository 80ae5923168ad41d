"""Consecutive tokens of a session with their rows. A block is never changed, only made anew under another name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

import torch
from torch import Tensor

Rows = dict[str, Tensor]  # name -> [..., tokens, width]; the name begins with the layer's number and a dot


class Coding(Protocol):
    """How the rows of a block are written smaller. What is decoded is what was given, or near it."""

    def encode(self, rows: Rows) -> Rows: ...

    def decode(self, rows: Rows) -> Rows: ...


class Plain:
    """As they are."""

    def encode(self, rows: Rows) -> Rows:
        return rows

    def decode(self, rows: Rows) -> Rows:
        return rows


@dataclass(frozen=True, slots=True)
class File:
    """`sha256`: of its head, which holds those of the tensors."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """`rows` is None where they lie on disk alone. Without tokens: what belongs to all of a session's together. `file`:
    how they were written, None if they were not."""

    name: str
    tokens: tuple[int, ...]
    size: int  # bytes of the rows
    rows: Rows | None
    file: File | None = None

    def tail(self, drop: int, coding: Coding) -> Block:
        """Without its first `drop` tokens, under a name of its own."""
        rows = {name: rows[..., drop:, :] for name, rows in coding.decode(self.rows or {}).items()}
        return block(self.tokens[drop:], coding.encode(rows))


def blocks(
    tokens: Sequence[int], layers: Mapping[str, Tensor], length: int, rest: Mapping[str, Tensor], coding: Coding
) -> Iterator[Block]:
    """Cuts [..., tokens, width] into blocks of `length` tokens; the last one may be shorter. `rest`, which belongs to
    all of them, is a block without tokens behind them; without rows there is one block of tokens before it."""
    for name, rows in layers.items():
        if rows.ndim < 2 or rows.shape[-2] != len(tokens):
            raise ValueError(
                f"{name} is {list(rows.shape)}: it should have {len(tokens)} tokens in its last but one place"
            )
    length = length if layers else max(1, len(tokens))
    for start in range(0, len(tokens), length):
        end = start + length
        yield block(tokens[start:end], coding.encode({name: one[..., start:end, :] for name, one in layers.items()}))
    if rest:
        yield block((), rest)


def block(tokens: Sequence[int], rows: Mapping[str, Tensor]) -> Block:
    copies = {name: host_copy(one) for name, one in rows.items()}
    return Block(uuid4().hex, tuple(tokens), sum(one.nbytes for one in copies.values()), copies)


def host_copy(rows: Tensor) -> Tensor:
    """In host memory, contiguous; pinned where it comes from a GPU, for it may go back there."""
    copy = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
    return copy.copy_(rows.detach())


def by_layer(names: Iterable[str]) -> dict[int, list[str]]:
    """Names without a layer's number come with layer 0."""
    found: dict[int, list[str]] = {}
    for name in names:
        number = name.partition(".")[0]
        found.setdefault(int(number) if number.isdigit() else 0, []).append(name)
    return found


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of blocks of tokens, copied into one tensor per name."""
    return {name: torch.cat([rows[name] for rows in parts], dim=-2) for name in parts[0]} if parts else {}


def has_rest(parts: Sequence[Block]) -> bool:
    """Whether something belongs to all of the blocks together."""
    return bool(parts) and not parts[-1].tokens


def covered(parts: Sequence[Block], tokens: Sequence[int]) -> int:
    """How many of the blocks, from the first on, hold just what `tokens` begin with."""
    start = 0
    for count, part in enumerate(parts):
        end = start + len(part.tokens)
        if tuple(tokens[start:end]) != part.tokens:
            return count
        start = end
    return len(parts)


def length(parts: Sequence[Block]) -> int:
    """In tokens."""
    return sum(len(part.tokens) for part in parts)
