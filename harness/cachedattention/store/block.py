"""A block: consecutive tokens (256 at most, by default) of a session, which is one conversation in
the store, with the rows of these tokens, which are their keys and values; and the file that holds
such a block.

A block is never changed, only made anew under another name. Its file is a safetensors file whose
tensors can be read and checked one by one: its head holds the SHA-256 of each tensor, and the file
of the session holds that of the head. Files are read, not mapped: one that is cut off meanwhile is
an error, not a crash."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """Report that a file of stored keys and values is not what was written."""


class NotSaved(RuntimeError):
    """Report that keys and values could not be copied from the device to host memory."""


class HistoryLost(RuntimeError):
    """Report that the stored keys and values of a conversation's history were found but cannot be
    read. The caller computes these tokens again, in a fresh cache."""


LOST = (OSError, DamagedBlock, NotSaved)  # what a session does not outlive


class Loss(StrEnum):
    """The reason why a stored conversation is not there any more, as text that the records of turns
    hold."""

    DISK_FULL = "the disk is full"
    NO_ROOM = "the tiers are full"
    TOO_OLD = "its time to live was over"
    DAMAGED = "a file is damaged or missing"
    UNUSABLE = "the disk cannot be used"
    NOT_COPIED = "its rows did not come from the device"


def loss_by(error: Exception) -> Loss:
    """Return the reason to record when a stored conversation is lost to `error`: an OSError, a
    `DamagedBlock`, or a `NotSaved` (its rows could not be copied from the device)."""
    if isinstance(error, (DamagedBlock, FileNotFoundError)):
        return Loss.DAMAGED
    if isinstance(error, NotSaved):
        return Loss.NOT_COPIED
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Loss.DISK_FULL if is_full else Loss.UNUSABLE


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """The size in bytes and the checksum of a block's file. `sha256` is that of the file's head,
    which in turn holds the checksum of every tensor."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """Hold consecutive tokens of a session (a stored conversation) with their rows, which are keys
    and values by name. `rows` is None if they lie only on disk; otherwise they are in host memory,
    or on their way there (upload.py). A block without tokens holds the tensors that belong to all
    tokens of a session together. `file`: size and checksum of the block's file, None before it is
    written."""

    name: str
    tokens: tuple[int, ...]
    size: int  # bytes of the rows
    rows: Mapping[str, Tensor] | None
    file: WrittenFile | None = None


def by_layer(names: Iterable[str]) -> dict[int, list[str]]:
    """Group names of tensors by the layer number with which they begin, as 3 in "3.k"; names
    without a number come with layer 0."""
    layers: dict[int, list[str]] = {}
    for name in names:
        number = name.partition(".")[0]
        layers.setdefault(int(number) if number.isdigit() else 0, []).append(name)
    return layers


def joined(parts: Sequence[Tensors]) -> Tensors:
    """Concatenate the rows of several blocks along their tokens, into one tensor per name."""
    return (
        {name: torch.cat([rows[name] for rows in parts], dim=-2) for name in parts[0]}
        if parts
        else {}
    )


def has_rest(parts: Sequence[Block]) -> bool:
    """Return whether the last block is one without tokens, which holds what belongs to all tokens
    of a session together."""
    return bool(parts) and not parts[-1].tokens


def covered(parts: Sequence[Block], tokens: Sequence[int]) -> int:
    """Count the blocks, from the first on, whose tokens are those with which `tokens` begin."""
    start = 0
    for count, part in enumerate(parts):
        end = start + len(part.tokens)
        if tuple(tokens[start:end]) != part.tokens:
            return count
        start = end
    return len(parts)


def length(parts: Sequence[Block]) -> int:
    """Return how many tokens the blocks hold together."""
    return sum(len(part.tokens) for part in parts)


SUM = "sha256."
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def write(path: Path, block: Block) -> WrittenFile:
    """Write a block's file and return its size and checksum. Readers see the whole file or none;
    its data has reached the disk before its name appears."""
    assert block.rows is not None
    tensors = {name: rows.cpu() for name, rows in block.rows.items()}
    sums = {f"{SUM}{name}": _sum(rows) for name, rows in tensors.items()}
    # which are none of a block without rows
    data = save(tensors, {"tokens": str(len(block.tokens)), **sums})
    with replacing(path) as file:
        file.write(data)
    return WrittenFile(hashlib.sha256(data[: 8 + _length(data)]).hexdigest(), len(data))


class BlockFile:
    """The file of a block (consecutive tokens with their keys and values), opened for reading. Its
    head is read and checked at once, its tensors when they are asked for. Both raise OSError, or
    `DamagedBlock` where they are not what was written."""

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
        """Return the names of the tensors in the file."""
        return list(self._tensors)

    def read(self, names: Iterable[str], place: Place) -> Tensors:
        """Read the named tensors into host memory, which is pinned where `place` has such memory.
        Raise `DamagedBlock` where a tensor does not match its checksum."""
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
    """Return the length in bytes of a safetensors file's head, which the file's first 8 bytes
    give."""
    return int.from_bytes(data[:8], "little")


def _bytes(tensor: Tensor) -> Any:
    """View a contiguous tensor as an array of bytes, without a copy."""
    return tensor.flatten().view(torch.uint8).numpy()


def _sum(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()
