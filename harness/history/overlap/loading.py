"""A stored history on its way to a job, layer by layer (CachedAttention, section 3.2.1)."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from time import perf_counter
from typing import NoReturn

import torch

from harness.history.block import Block, has_rest, joined, length
from harness.history.file import DamagedBlock
from harness.history.losses import Loss
from harness.history.overlap.fetch import Fetch
from harness.history.overlap.leaving import NotSaved
from harness.history.overlap.speeds import Speeds
from harness.history.statistics import Statistics
from methods.tiers.block import Format, Tensors
from methods.tiers.transfer.spans import Spans
from methods.tiers.transfer.streams import beside_the_model, reached

LOST = (OSError, sqlite3.Error, DamagedBlock, NotSaved)  # what a disk does, and the way to host memory
Layer = tuple[Tensors, Tensors]  # rows of tokens, and what belongs to all of them together, by name
Prepare = Callable[[int, Layer], Layer]


def as_it_is(number: int, layer: Layer) -> Layer:
    return layer


class HistoryLost(RuntimeError):
    """The rows that were found cannot be read: compute their tokens again, in a fresh cache."""


def loss_by(error: Exception) -> Loss:
    """error: one of `LOST`"""
    if isinstance(error, DamagedBlock):
        return Loss.DAMAGED
    if isinstance(error, NotSaved):
        return Loss.NOT_COPIED
    in_index = isinstance(error, sqlite3.Error) and "full" in str(error)
    in_file = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Loss.DISK_FULL if in_index or in_file else Loss.UNUSABLE


@dataclass(frozen=True, slots=True)
class Overlap:
    """`load_s`: seconds in which rows were on their way, `hidden_s` of them while the job computed or had not begun.
    `exposed_s`: in which the job waited. `read_buffer`: layers that came before it began."""

    load_s: float
    hidden_s: float
    exposed_s: float
    read_buffer: int


@dataclass(frozen=True, slots=True)
class Accounts:
    """Where a store writes down what loading took."""

    statistics: Statistics
    speeds: Speeds


@dataclass(frozen=True, slots=True)
class Events:
    """Whom a loading tells that its job has begun, and that its rows cannot be read."""

    accounts: Accounts
    begun: Callable[[Loading], None]
    lost: Callable[[Loading, Exception], HistoryLost]


class Loading:
    """The first `tokens` of those asked for, found in `tier`. The first layers, as many as the read buffer holds, come
    at once; `begin` says that the job begins, and the others come too. `layer` waits for the rows of one.

    What it hands out are copies, rows on the device of the store. It belongs to the thread of the store."""

    def __init__(
        self,
        fetch: Fetch,
        read: Callable[[int | None], None],
        parts: Sequence[Block],
        tier: str,
        new: int,
        *,
        on: torch.device,
        copier: Executor,
        prepare: Prepare,
        format_: Format,
        events: Events,
    ) -> None:
        """`read`: lets `fetch` read so many layers, or all. `new`: tokens that the job has to compute. `prepare`: what
        the thread that copies does with a layer next."""
        self.tokens, self.tier, self.new = length(parts), tier, new
        self.size = sum(part.size for part in parts)
        self.fetch, self._read, self._count, self._on = fetch, read, len(parts), on
        self._behind = reached(on)  # what `prepare` uses was made on the caller's stream
        self._copier, self._prepare, self._format, self._events = copier, prepare, format_, events
        self._rest = has_rest(parts)
        self._copies: dict[int, Future[Layer]] = {}
        self._sent = 0  # layers whose copies were submitted
        self._spans = Spans()
        self._opened = perf_counter()
        self._began: float | None = None
        self._buffer = 0
        self._waits = Spans()  # of the job

    def layers(self) -> list[int]:
        """Their numbers."""
        try:
            return self.fetch.layers()
        except LOST as error:
            self._fail(error)

    def preload(self, layers: int | None = None) -> None:
        """So many, before the job begins; None: as `Speeds` has measured."""
        number = len(self.layers())
        if layers is None:
            layers = self._events.accounts.speeds.read_buffer(self.tier, self.size, number, self.new)
        self._buffer = max(0, min(layers, number))
        self._read(self._buffer)
        self._submit(self._buffer)

    def begin(self) -> None:
        """The job begins, and its own memory takes the other layers."""
        if self._began is None:
            self._began = perf_counter()
            self._events.begun(self)
            self._read(None)
            self._submit(len(self.layers()))
            self._waits.ended(self._began)

    @property
    def begun(self) -> bool:
        return self._began is not None

    def layer(self, number: int) -> Layer:
        """Once. Raises `HistoryLost`: then nothing of this history may be used."""
        self.begin()
        asked = perf_counter()
        try:
            return _handed_over(self._copies.pop(number).result())
        except LOST as error:
            self._fail(error)
        finally:
            self._waits.ended(asked)

    def all_layers(self) -> Layer:
        """As one."""
        self.begin()
        rows: Tensors = {}
        rest: Tensors = {}
        for number in self.layers():
            more = self.layer(number)
            rows |= more[0]
            rest |= more[1]
        return rows, rest

    @property
    def overlap(self) -> Overlap:
        loads = self.fetch.spans.since(self._opened) + self._spans
        return Overlap(loads.seconds, loads.seconds_without(self._waits), self._waits.seconds, self._buffer)

    def finish(self) -> Overlap:
        """The job has computed its new tokens. What that took says how large the next read buffer is."""
        if self._began is not None:
            computing_s = perf_counter() - self._began - self._waits.seconds
            self._events.accounts.speeds.prefilled(self.new, computing_s)
        return self.account()

    def account(self) -> Overlap:
        """All rows have been asked for: into the statistics."""
        found = self.overlap
        self._events.accounts.speeds.loaded(self.tier, self.size, found.load_s)
        self._events.accounts.statistics.load_s += found.load_s
        self._events.accounts.statistics.hidden_s += found.hidden_s
        self._events.accounts.statistics.exposed_s += found.exposed_s
        return found

    def _submit(self, layers: int) -> None:
        for number in self.layers()[self._sent : layers]:
            self._copies[number] = self._copier.submit(self._copy, number)
        self._sent = max(self._sent, layers)

    def _copy(self, number: int) -> Layer:
        parts = self.fetch.rows(number)[: self._count]
        began = perf_counter()
        rest = {name: one.clone() for name, one in parts.pop().items()} if self._rest else {}
        with beside_the_model(self._on, self._behind):
            near = [{name: one.to(self._on, non_blocking=True) for name, one in part.items()} for part in parts]
            rows = joined([self._format.decode(part) for part in near])
            layer = self._prepare(number, (rows, rest))
        self._spans.ended(began)
        return layer

    def _fail(self, error: Exception) -> NoReturn:
        raise self._events.lost(self, error) from error


def _handed_over(layer: Layer) -> Layer:
    """Its memory is not given away before the asking stream has done what it was asked."""
    for one in layer[0].values():
        if one.is_cuda:
            one.record_stream(torch.cuda.current_stream(one.device))
    return layer
