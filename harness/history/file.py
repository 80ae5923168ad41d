"""A block as a safetensors file whose tensors can be read and checked one by one.

Its head holds the SHA-256 of each tensor and of the token ids, and the index that of the head. Files are read, not
mapped: one that is cut off meanwhile is an error, not a crash.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from harness.history.block import Block, File
from methods.tiers.block import Tensors, host_copy

TOKENS, SUM = "tokens", "sha256."
PARTIAL = ".partial"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class DamagedBlock(ValueError):
    """A block's file is missing, or is not what was written."""


def write(path: Path, block: Block) -> File:
    """Readers see the whole file or none; it has reached the disk when its name has."""
    assert block.rows is not None
    tensors = {name: host_copy(rows) if rows.is_cuda else rows for name, rows in block.rows.items()}
    sums = {f"{SUM}{name}": _sum(rows) for name, rows in tensors.items()}
    data = save(tensors, sums | {TOKENS: _sum(torch.tensor(block.tokens))})
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
    return File(hashlib.sha256(data[: 8 + _length(data)]).hexdigest(), len(data))


class BlockFile:
    """Its head is read and checked; rows are when they are asked for. Both raise `DamagedBlock`."""

    def __init__(self, path: Path, block: Block) -> None:
        assert block.file is not None
        self.path = path
        with _damage(path), open(path, "rb") as file:
            head = file.read(8)
            head += file.read(min(_length(head), block.file.bytes))
            whole = os.fstat(file.fileno()).st_size == block.file.bytes
        if not whole or hashlib.sha256(head).hexdigest() != block.file.sha256:
            raise DamagedBlock(f"{path} is not what was written")
        self._tensors: dict[str, Any] = json.loads(head[8:])
        self._sums: dict[str, str] = self._tensors.pop("__metadata__")
        self._start = len(head)
        if self._sums[TOKENS] != _sum(torch.tensor(block.tokens)):
            raise DamagedBlock(f"{path} holds other tokens")

    @property
    def names(self) -> list[str]:
        """Of the rows."""
        return list(self._tensors)

    def read(self, names: Iterable[str], pin: bool = False) -> Tensors:
        with _damage(self.path), open(self.path, "rb", buffering=0) as file:
            return {name: self._tensor(file.fileno(), name, pin) for name in names}

    def _tensor(self, fd: int, name: str, pin: bool) -> Tensor:
        if name not in self._tensors:
            raise DamagedBlock(f"{self.path} lacks {name}")
        about = self._tensors[name]
        tensor = torch.empty(about["shape"], dtype=DTYPES[about["dtype"]], pin_memory=pin)
        left = memoryview(_bytes(tensor))
        place = self._start + about["data_offsets"][0]
        while left and (count := os.preadv(fd, [left], place)):
            left, place = left[count:], place + count
        if left or _sum(tensor) != self._sums[SUM + name]:
            raise DamagedBlock(f"{self.path} is not what was written")
        return tensor


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DamagedBlock(f"{path} cannot be read: {error}") from error


def _length(data: bytes) -> int:
    """Of the head, behind the 8 bytes that say it."""
    return int.from_bytes(data[:8], "little")


def _bytes(tensor: Tensor) -> Any:
    """Of a contiguous tensor, not copied."""
    return tensor.flatten().view(torch.uint8).numpy()


def _sum(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()
