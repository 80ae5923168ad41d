"""Holds tensors [B G C W], with C rows per KV head, on the device, in host memory or on disk: a
class for each tier. The bytes of rows that move to the device or away from it are counted here."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from shutil import copyfile
from tempfile import gettempdir, mkstemp
from typing import ClassVar
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from kernels import ops
from kernels.partial import BESIDE
from kernels.temporary import TemporaryFolder
from methods.tiers.pinned_memory import PinnedPool, Region
from methods.tiers.tier import DEVICE, DISK, HOST, tier_of
from methods.tiers.traffic import Traffic

Shape = tuple[int, ...]
BLOCK_BYTES = 64 * 1024  # from such pieces on a PCIe 5 link is full (vLLM PR 42212)
# from here on glibc maps memory for a tensor alone, which nothing has touched
OWN_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Place:
    """Say where tensors may lie. `device`: the device that computes. `folder`: for rows in files;
    None: the system's temporary one. `region`: host memory that is pinned already; None: memory is
    pinned when rows arrive."""

    device: torch.device
    folder: Path | None = None
    region: Region | PinnedPool | None = None


class PlaceError(ValueError):
    """Report that a folder cannot hold the files of keys and values (placement=disk), and why."""


class Rows(ABC):
    """Hold rows [B G C W] of keys, values or codes in one tier (device, host memory or disk). `put`
    stores rows that come from the device, and what is read is returned on the device; bytes that
    cross between the two are counted in the `traffic` given."""

    tier: ClassVar[str]
    # a step appends to them, and changes no existing row
    steady: ClassVar[tuple[str, ...]] = ("stored",)

    def __init__(self, shape: Shape, dtype: torch.dtype, place: Place) -> None:
        self.shape, self.dtype, self.device = shape, dtype, place.device

    @abstractmethod
    def take(self, x: Tensor, start: int) -> None:
        """Store x [B G T W], from whatever device, as the rows from `start` on. Unlike with `put`,
        its bytes do not count as moved."""

    @abstractmethod
    def _all(self) -> Tensor:
        """Return all rows [B G C W] where they lie; those on disk as a mapped file."""

    @abstractmethod
    def _send(self, x: Tensor, traffic: Traffic) -> Tensor:
        """Return rows that were read, on the device, and count their bytes in `traffic`."""

    def put(self, x: Tensor, start: int, traffic: Traffic) -> None:
        """Store x [B G T W] from the device as the rows from `start` on, and count its bytes in
        `traffic`."""
        self.take(x, start)
        traffic.to_host_bytes += x.nbytes

    def held(self, count: int) -> Tensor:
        """Return the first `count` rows [B G count W] where they lie: on the device, in host memory
        or on disk. No bytes move."""
        return self._all()[:, :, :count]

    def gather(
        self,
        rows: Tensor,
        traffic: Traffic,
        slots: Tensor | None = None,
        held: Tensor | None = None,
    ) -> Tensor:
        """Return chosen rows on the device, rows [B G K] -> [B G K W].

        `slots` [B G K] and `held` [B G C W] avoid moving what a cache on the device has: a row
        whose slot is 0 or more is copied from that row of `held`, or is arbitrary if `held` is
        None. The tier on the device may read its own rows instead."""
        stored = self._all()
        return self._send(ops.gather_rows(stored, rows.to(stored.device)), traffic)

    def gather_into(self, out: Tensor, rows: Tensor, traffic: Traffic) -> None:
        """Write chosen rows into out [B G K W], which is contiguous and on the device, a CPU. Where
        rows [B G K] are negative, it stays as it is."""
        ops.gather_rows(self._all(), rows, out)
        if self.tier != DEVICE:
            self._send(out.flatten(0, 2)[: int((rows >= 0).sum())], traffic)  # so that they count

    def columns(self, columns: Tensor, count: int, traffic: Traffic) -> Tensor:
        """Return chosen columns of the first `count` rows on the device, columns [B G N] ->
        [B G N count]."""
        stored = self._all()
        at = columns.to(stored.device).unsqueeze(3).expand(-1, -1, -1, count)
        return self._send(stored[:, :, :count].mT.gather(2, at), traffic)

    def first(self, count: int, traffic: Traffic) -> Tensor:
        """Return the first `count` rows [B G count W] on the device."""
        return self._send(self._all()[:, :, :count], traffic)


class MemoryRows(Rows):
    """Hold rows in memory, as one tensor."""

    def __init__(self, shape: Shape, dtype: torch.dtype, place: Place) -> None:
        super().__init__(shape, dtype, place)
        self.stored = self.room(shape, dtype, place)

    @classmethod
    @abstractmethod
    def room(cls, shape: Shape, dtype: torch.dtype, place: Place) -> Tensor:
        """Allocate the memory for a tensor of this shape in this tier, uninitialised; the shape may
        have any number of dimensions."""

    def take(self, x: Tensor, start: int) -> None:
        self.stored[:, :, start : start + x.shape[2]] = x

    def _all(self) -> Tensor:
        return self.stored

    def __deepcopy__(self, memo: object) -> MemoryRows:
        copied = copy(self)
        copied.stored = self.room(self.stored.shape, self.dtype, Place(self.device)).copy_(
            self.stored
        )
        return copied


def in_large_pages(x: Tensor) -> Tensor:
    """Ask Linux to give new memory of the CPU pages of 2 MB, and return x: each row that is chosen from
    it costs a walk through the tables of pages, which is long for small ones."""
    if sys.platform == "linux" and x.device.type == "cpu" and x.nbytes >= OWN_BYTES:
        first = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = ctypes.c_size_t(x.data_ptr() + x.nbytes - first)
        # what it answers where all pages have one size does not matter
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, mmap.MADV_HUGEPAGE)
    return x


class DeviceRows(MemoryRows):
    """Hold rows on the device of the model: nothing moves when they are put there or read."""

    tier = DEVICE

    @classmethod
    def room(cls, shape: Shape, dtype: torch.dtype, place: Place) -> Tensor:
        return in_large_pages(torch.empty(shape, dtype=dtype, device=place.device))

    def put(self, x: Tensor, start: int, traffic: Traffic) -> None:
        self.take(x, start)

    def _send(self, x: Tensor, traffic: Traffic) -> Tensor:
        return x


class HostRows(MemoryRows):
    """Hold rows in host memory, which is pinned if the device is a CUDA device, so that kernels can
    read it."""

    tier = HOST

    def take(self, x: Tensor, start: int) -> None:
        """Store x [B G T W] as the rows from `start` on, head by head: between a GPU and the host
        torch would first copy rows with gaps between them to another tensor on either side."""
        for stored, rows in zip(self.stored.flatten(0, 1), x.flatten(0, 1), strict=True):
            stored[start : start + x.shape[2]] = rows

    @classmethod
    def room(cls, shape: Shape, dtype: torch.dtype, place: Place) -> Tensor:
        there = None if place.region is None else place.region.cut(shape, dtype)
        return (
            torch.empty(shape, dtype=dtype, pin_memory=place.device.type == "cuda")
            if there is None
            else there
        )

    def gather(
        self,
        rows: Tensor,
        traffic: Traffic,
        slots: Tensor | None = None,
        held: Tensor | None = None,
    ) -> Tensor:
        """Let a kernel on the device read the chosen rows in host memory, so that the host need not
        wait for their numbers. Arguments as in `Rows.gather`."""
        if slots is not None and held is None:
            nothing = (*self.shape[:2], 1, self.shape[3])
            held, slots = self.stored.new_zeros(nothing, device=self.device), slots.clamp(max=0)
        moved = ops.gather_tiers(self.stored, rows, held, slots)
        if slots is None:
            traffic.to_device_bytes += moved.nbytes
        else:
            traffic.tally(
                "to_device_bytes", (slots < 0).sum() * (self.shape[3] * self.dtype.itemsize)
            )
        return moved

    def first(self, count: int, traffic: Traffic) -> Tensor:
        """Return the first `count` rows [B G count W] on the device. Whole heads are copied one by
        one if each is large enough to fill the link. With smaller pieces a copy takes longer to
        start than to move: the device then reads them where they lie, if that memory is pinned, or
        the host gathers them first."""
        rows = self.held(count)
        if self.device.type == "cpu" or rows.is_contiguous():
            return self._send(rows, traffic)
        if rows.nbytes < BLOCK_BYTES * self.shape[0] * self.shape[1]:
            if not rows.is_pinned():
                return self._send(rows, traffic)
            return self.gather(
                torch.arange(count, device=self.device).expand(*self.shape[:2], -1), traffic
            )
        moved = torch.empty(rows.shape, dtype=self.dtype, device=self.device)
        for there, here in zip(moved.flatten(0, 1), rows.flatten(0, 1), strict=True):
            there.copy_(here, non_blocking=True)
        traffic.to_device_bytes += moved.nbytes
        return moved

    def columns(self, columns: Tensor, count: int, traffic: Traffic) -> Tensor:
        """Let a kernel on the device read the chosen columns' numbers in host memory one by one, so
        that the host need not wait for `columns`. A real bus moves 32 bytes for each; the bytes of
        the numbers alone are counted."""
        every = torch.arange(count, device=columns.device) * self.shape[3]
        at = (columns.unsqueeze(3) + every).flatten(2)
        numbers = self.stored.view(*self.shape[:2], -1, 1)
        moved = ops.gather_tiers(numbers, at, None, None)
        traffic.to_device_bytes += moved.nbytes
        return moved.view(*columns.shape, count)

    def _send(self, x: Tensor, traffic: Traffic) -> Tensor:
        traffic.to_device_bytes += x.nbytes
        return x.to(self.device, non_blocking=True)


class DiskRows(Rows):
    """Hold rows in a file, which is deleted with this object. It lies in a temporary folder of this
    process, below `place.folder`. The file is mapped for reading and unmapped at once, so it
    neither stays in the memory of this process nor open; the system may still cache it."""

    tier = DISK

    def __init__(self, shape: Shape, dtype: torch.dtype, place: Place) -> None:
        super().__init__(shape, dtype, place)
        with _writing(place.folder):
            folder = _folder_in(place.folder)
        self.file = self.room(shape, dtype, place)
        finalize(self, _delete, self.file, folder)

    @classmethod
    def room(cls, shape: Shape, dtype: torch.dtype, place: Place) -> Path:
        with _writing(place.folder):
            handle, name = mkstemp(".rows", "", _folder_in(place.folder).path)
            os.truncate(handle, prod(shape) * dtype.itemsize)
            os.close(handle)
        return Path(name)

    def __deepcopy__(self, memo: object) -> DiskRows:
        folder = self.file.parent.parent
        copied = DiskRows(self.shape, self.dtype, Place(self.device, folder))
        with _writing(folder):
            copyfile(self.file, copied.file)
        return copied

    def take(self, x: Tensor, start: int) -> None:
        row_bytes = self.shape[3] * self.dtype.itemsize
        with _writing(self.file.parent.parent), self.file.open("r+b") as file:
            for head, rows in enumerate(x.flatten(0, 1).cpu()):
                file.seek((head * self.shape[2] + start) * row_bytes)
                file.write(rows.contiguous().view(torch.uint8).numpy())

    def gather(
        self,
        rows: Tensor,
        traffic: Traffic,
        slots: Tensor | None = None,
        held: Tensor | None = None,
    ) -> Tensor:
        """Return chosen rows on the device, and read from the file only those that the device does
        not hold (their entry in `slots` is -1). Arguments as in `Rows.gather`."""
        if slots is None:
            return super().gather(rows, traffic)
        heads = torch.arange(prod(self.shape[:2])).view(*self.shape[:2], 1)
        missing = slots.cpu() < 0
        at = (heads * self.shape[2] + rows.cpu())[missing]
        read = self._send(
            ops.gather_rows(self._all().flatten(0, 2)[None, None], at[None, None])[0, 0], traffic
        )
        nothing = read.new_zeros(*rows.shape, self.shape[3])
        moved: Tensor = nothing if held is None else ops.gather_rows(held, slots.clamp(min=0))
        moved[missing.to(self.device)] = read
        return moved

    def _all(self) -> Tensor:
        if not prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_file(
            str(self.file), shared=False, size=prod(self.shape), dtype=self.dtype
        ).view(self.shape)

    def _send(self, x: Tensor, traffic: Traffic) -> Tensor:
        traffic.from_disk_bytes += x.nbytes
        traffic.to_device_bytes += x.nbytes
        return x.to(self.device, copy=True)


@contextmanager
def _writing(folder: Path | None) -> Iterator[None]:
    """Turn an `OSError` in this block, such as a full disk, into a `PlaceError` that names the
    folder and what to do."""
    try:
        yield
    except OSError as error:
        raise PlaceError(
            f"placement=disk cannot keep its files in {folder or gettempdir()} ({error.strerror}): free some space "
            "there, or set TMPDIR to another folder."
        ) from error


def _delete(file: Path, folder: TemporaryFolder) -> None:
    """Delete the `file` in which a `DiskRows` held its rows. The finalizer that calls this keeps
    `folder` alive until then: were the folder an attribute of the rows, its bytes would count as
    theirs."""
    file.unlink(missing_ok=True)


def _folder_in(parent: Path | None) -> TemporaryFolder:
    """Return the temporary folder in `parent` for the files of all rows of this process; it is
    deleted when the last of them is."""
    if (folder := _folders.get(parent)) is None:
        folder = _folders[parent] = TemporaryFolder("kv-rows-", parent)
    return folder


_folders: WeakValueDictionary[Path | None, TemporaryFolder] = WeakValueDictionary()


def room_for(width: int, device: torch.device) -> int:
    """Return how many entries apart rows of `width` entries should lie, if kernels on `device` read
    them entry after entry: on a GPU a multiple of `BESIDE`, so that they load several at once, and
    always more than `width`, so that a captured step can serve rows of any width."""
    return width if device.type == "cpu" else (width // BESIDE + 1) * BESIDE


def copied_into(tier: str, x: Tensor, place: Place) -> Tensor:
    """Copy x, which is contiguous, into memory of the tier named `tier`: device or host, but not
    disk."""
    kind = rows_in(tier)
    assert issubclass(kind, MemoryRows)
    return kind.room(x.shape, x.dtype, place).copy_(x.detach())


def rows_in(tier: str) -> type[Rows]:
    """Return the class of rows for the tier named `tier`: device, host or disk."""
    module, _, name = tier_of(tier).rows.rpartition(".")
    return getattr(import_module(module), name)
