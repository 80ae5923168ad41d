"""Consecutive tokens of a session with their rows, and the file of such a block.

A block is never changed, only made anew under another name. Its file is a safetensors file whose tensors can be read
and checked one by one: its head holds the SHA-256 of each tensor, its session that of the head.
Files are read, not mapped: one that is cut off meanwhile is an error, not a crash.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from kernels.temporary import replacing
from methods.tiers.block import Tensors
from methods.tiers.rows import HostRows, Place


class DamagedBlock(ValueError):
    """Raised where a block's file is not what was written."""


class NotSaved(RuntimeError):
    """Raised where rows could not be brought to host memory."""


class HistoryLost(RuntimeError):
    """Raised where rows that were found cannot be read: compute their tokens again, in a fresh cache."""


LOST = (OSError, DamagedBlock, NotSaved)  # what a session does not outlive


class Loss(StrEnum):
    """The reason why a session that was stored is not there any more, in the words of the records."""

    DISK_FULL = "the disk is full"
    NO_ROOM = "the tiers are full"
    TOO_OLD = "its time to live was over"
    DAMAGED = "a file is damaged or missing"
    UNUSABLE = "the disk cannot be used"
    NOT_COPIED = "its rows did not come from the device"


def loss_by(error: Exception) -> Loss:
    """Return the loss that `error`, one of `LOST`, means."""
    if isinstance(error, (DamagedBlock, FileNotFoundError)):
        return Loss.DAMAGED
    if isinstance(error, NotSaved):
        return Loss.NOT_COPIED
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Loss.DISK_FULL if is_full else Loss.UNUSABLE


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """The size and checksum of a block's file. `sha256`: of its head, which holds those of the tensors."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive tokens of a session with their rows. `rows` is None where these lie on disk alone, else they are in
    host memory, or on their way there (upload.py). A block without tokens holds what belongs to all tokens of a session
    together. `file`: how the rows were written, if they were."""

    name: str
    tokens: tuple[int, ...]
    size: int  # bytes of the rows
    rows: Mapping[str, Tensor] | None
    file: WrittenFile | None = None


def by_layer(names: Iterable[str]) -> dict[int, list[str]]:
    """Return the names by the layer with which they begin; names without a number come with layer 0."""
    layers: dict[int, list[str]] = {}
    for name in names:
        number = name.partition(".")[0]
        layers.setdefault(int(number) if number.isdigit() else 0, []).append(name)
    return layers


def joined(parts: Sequence[Tensors]) -> Tensors:
    """Return the rows of blocks of tokens, copied into one tensor per name."""
    return {name: torch.cat([rows[name] for rows in parts], dim=-2) for name in parts[0]} if parts else {}


def has_rest(parts: Sequence[Block]) -> bool:
    """Return whether the last block belongs to all tokens together."""
    return bool(parts) and not parts[-1].tokens


def covered(parts: Sequence[Block], tokens: Sequence[int]) -> int:
    """Return how many of the blocks, from the first on, hold just what `tokens` begin with."""
    start = 0
    for count, part in enumerate(parts):
        end = start + len(part.tokens)
        if tuple(tokens[start:end]) != part.tokens:
            return count
        start = end
    return len(parts)


def length(parts: Sequence[Block]) -> int:
    """Return the number of tokens of the blocks."""
    return sum(len(part.tokens) for part in parts)


@dataclass(frozen=True, slots=True)
class FoundHistory:
    """The part of the tokens asked for that a store has: the first `tokens` of them, in `layers`; `tier` is None on a
    miss."""

    tokens: int = 0
    tier: str | None = None
    layers: Tensors = field(default_factory=dict)
    rest: Tensors = field(default_factory=dict)


SUM = "sha256."
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def write(path: Path, block: Block) -> WrittenFile:
    """Write a block's file. Readers see the whole file or none; it has reached the disk when its name has."""
    assert block.rows is not None
    tensors = {name: rows.cpu() for name, rows in block.rows.items()}
    sums = {f"{SUM}{name}": _sum(rows) for name, rows in tensors.items()}
    data = save(tensors, {"tokens": str(len(block.tokens)), **sums})  # which are none of a block without rows
    with replacing(path) as file:
        file.write(data)
    return WrittenFile(hashlib.sha256(data[: 8 + _length(data)]).hexdigest(), len(data))


class BlockFile:
    """A block's file, whose head is read and checked at once, and whose rows are when they are asked for. Both raise
    `DamagedBlock` where they are not what was written, and OSError."""

    def __init__(self, path: Path, block: Block) -> None:
        assert block.file is not None
        self.path = path
        with open(path, "rb") as file:
            head = file.read(8)
            head += file.read(min(_length(head), block.file.bytes))
            whole = os.fstat(file.fileno()).st_size == block.file.bytes
        if not whole or hashlib.sha256(head).hexdigest() != block.file.sha256:
            raise DamagedBlock(f"{path} is not what was written")
        self._tensors: dict[str, Any] = json.loads(head[8:])
        self._sums: dict[str, str] = self._tensors.pop("__metadata__")
        self._start = len(head)

    @property
    def names(self) -> list[str]:
        """Return the names of the rows."""
        return list(self._tensors)

    def read(self, names: Iterable[str], place: Place) -> Tensors:
        """Read the named rows into host memory of `place`."""
        with open(self.path, "rb") as file:
            return {name: self._tensor(file, name, place) for name in names}

    def _tensor(self, file: BufferedReader, name: str, place: Place) -> Tensor:
        about = self._tensors[name]
        tensor = HostRows.room(about["shape"], DTYPES[about["dtype"]], place)
        file.seek(self._start + about["data_offsets"][0])
        if file.readinto(_bytes(tensor)) < tensor.nbytes or _sum(tensor) != self._sums[SUM + name]:
            raise DamagedBlock(f"{self.path} is not what was written")
        return tensor


def _length(data: bytes) -> int:
    """Return the length of a file's head, which its first 8 bytes give."""
    return int.from_bytes(data[:8], "little")


def _bytes(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous tensor, not copied."""
    return tensor.flatten().view(torch.uint8).numpy()


def _sum(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()
