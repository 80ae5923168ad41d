"""Consecutive tokens of a session with their rows, in memory or as one safetensors file.

A block is never changed: a file is written once, under another name first, and checked whenever it is read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

Rows = dict[str, Tensor]  # name -> [..., tokens, width]
TOKENS, ROWS = "tokens", "rows."
PARTIAL = ".partial"


class DamagedBlock(ValueError):
    """A block's file is missing, or is not what was written."""


@dataclass(slots=True)
class Block:
    """`rows` is None where they lie on disk alone. Without tokens: what belongs to all of a session's together."""

    name: str
    tokens: tuple[int, ...]
    size: int  # bytes of the rows
    rows: Rows | None

    def tail(self, drop: int) -> Block:
        """Without its first `drop` tokens, under a name of its own."""
        assert self.rows is not None
        return block(self.tokens[drop:], {name: rows[..., drop:, :] for name, rows in self.rows.items()})


@dataclass(frozen=True, slots=True)
class File:
    sha256: str
    bytes: int


def blocks(
    tokens: Sequence[int], layers: Mapping[str, Tensor], length: int, rest: Mapping[str, Tensor]
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
        yield block(tokens[start:end], {name: rows[..., start:end, :] for name, rows in layers.items()})
    if rest:
        yield block((), rest)


def block(tokens: Sequence[int], rows: Mapping[str, Tensor]) -> Block:
    copies = {name: host_copy(one) for name, one in rows.items()}
    return Block(uuid4().hex, tuple(tokens), sum(one.nbytes for one in copies.values()), copies)


def host_copy(rows: Tensor) -> Tensor:
    """In host memory, contiguous; pinned where it comes from a GPU, for it may go back there."""
    copy = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
    return copy.copy_(rows.detach())


def joined(parts: Sequence[Block]) -> Rows:
    """The rows of all blocks of tokens, copied into one tensor per name."""
    found = [part.rows or {} for part in parts if part.tokens]
    return {name: torch.cat([rows[name] for rows in found], dim=-2) for name in found[0]} if found else {}


def has_rest(parts: Sequence[Block]) -> bool:
    """Whether something belongs to all of the blocks together."""
    return bool(parts) and not parts[-1].tokens


def rest_of(parts: Sequence[Block]) -> Rows:
    """That, copied."""
    return {name: one.clone() for name, one in (parts[-1].rows or {}).items()} if has_rest(parts) else {}


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


def write(path: Path, one: Block, about: Mapping[str, str]) -> File:
    """Readers see the whole file or none; it has reached the disk when its name has."""
    assert one.rows is not None
    tensors = {f"{ROWS}{name}": host_copy(rows) if rows.is_cuda else rows for name, rows in one.rows.items()}
    data = save(tensors | {TOKENS: torch.tensor(one.tokens)}, dict(about))
    partial = path.with_suffix(PARTIAL)
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return File(hashlib.sha256(data).hexdigest(), len(data))


def read(path: Path, one: Block, file: File) -> Block:
    """`one` with its rows in host memory."""
    try:
        data = path.read_bytes()
        if len(data) != file.bytes or hashlib.sha256(data).hexdigest() != file.sha256:
            raise DamagedBlock(f"{path} is not what was written")
        tensors = load(data)
    except (OSError, SafetensorError) as error:
        raise DamagedBlock(f"{path} cannot be read: {error}") from error
    if tuple(tensors.pop(TOKENS).tolist()) != one.tokens:
        raise DamagedBlock(f"{path} holds other tokens")
    return replace(one, rows={name.removeprefix(ROWS): rows for name, rows in tensors.items()})
