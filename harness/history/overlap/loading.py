"""A stored history on its way to a job, layer by layer (CachedAttention, section 3.2.1)."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from time import perf_counter
from typing import NoReturn

import torch

from harness.history.block import Block, Rows, has_rest, joined, length
from harness.history.file import DamagedBlock
from harness.history.overlap.fetch import Fetch, Span
from harness.history.overlap.speeds import Speeds
from harness.history.statistics import Statistics

LOST = (OSError, sqlite3.Error, DamagedBlock)  # what a disk does
Layer = tuple[Rows, Rows]  # rows of tokens, and what belongs to all of them together, by name


class HistoryLost(RuntimeError):
    """The rows that were found cannot be read: compute their tokens again, in a fresh cache."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """`load_s`: seconds in which rows were on their way; of them the job has waited for `exposed_s`. `read_buffer`:
    layers that came before the job began."""

    load_s: float = 0.0
    exposed_s: float = 0.0
    read_buffer: int = 0

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.load_s - self.exposed_s)


@dataclass(frozen=True, slots=True)
class Accounts:
    """Where a store writes down what loading took."""

    statistics: Statistics
    speeds: Speeds


class Loading:
    """The first `tokens` of those asked for, found in `tier`. The first layers, as many as the read buffer holds, come
    at once; `begin` says that the job begins, and the others come too. `layer` waits for the rows of one.

    What it hands out are copies, rows on the device of the store. It belongs to the thread of the store."""

    def __init__(
        self,
        fetch: Fetch,
        parts: Sequence[Block],
        tier: str,
        new: int,
        *,
        on: torch.device,
        copier: Executor,
        accounts: Accounts,
        lost: Callable[[Loading, Exception], HistoryLost],
    ) -> None:
        """`new`: tokens that the job has to compute."""
        self.tokens, self.tier, self.new = length(parts), tier, new
        self.size = sum(part.size for part in parts)
        self.fetch, self._count, self._on = fetch, len(parts), on
        self._copier, self._accounts, self._lost = copier, accounts, lost
        self._rest = has_rest(parts)
        self._copies: dict[int, Future[Layer]] = {}
        self._sent = 0  # layers whose copies were submitted
        self._spans: list[Span] = []
        self._opened = perf_counter()
        self._began: float | None = None
        self._buffer = 0
        self._exposed_s = 0.0

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
            layers = self._accounts.speeds.read_buffer(self.tier, self.size, number, self.new)
        self._buffer = min(layers, number)
        self._submit(self._buffer)

    def begin(self) -> None:
        """The job begins, and its own memory takes the other layers."""
        if self._began is None:
            self._began = perf_counter()
            self._submit(len(self.layers()))
            self._exposed_s += perf_counter() - self._began

    def layer(self, number: int) -> Layer:
        """Once. Raises `HistoryLost`: then nothing of this history may be used."""
        self.begin()
        asked = perf_counter()
        try:
            return _handed_over(self._copies.pop(number).result())
        except LOST as error:
            self._fail(error)
        finally:
            self._exposed_s += perf_counter() - asked

    def all_layers(self) -> Layer:
        """As one."""
        rows: Rows = {}
        rest: Rows = {}
        for number in self.layers():
            more = self.layer(number)
            rows |= more[0]
            rest |= more[1]
        return rows, rest

    @property
    def overlap(self) -> Overlap:
        since = [(max(start, self._opened), end) for start, end in self.fetch.spans if end > self._opened]
        return Overlap(_covered([*since, *self._spans]), self._exposed_s, self._buffer)

    def finish(self) -> Overlap:
        """The job has computed its new tokens. What that took says how large the next read buffer is."""
        if self._began is not None:
            self._accounts.speeds.prefilled(self.new, perf_counter() - self._began - self._exposed_s)
        return self.account()

    def account(self) -> Overlap:
        """All rows have been asked for: into the statistics."""
        found = self.overlap
        self._accounts.speeds.loaded(self.tier, self.size, found.load_s)
        self._accounts.statistics.load_s += found.load_s
        self._accounts.statistics.exposed_s += found.exposed_s
        return found

    def _submit(self, layers: int) -> None:
        for number in self.layers()[self._sent : layers]:
            self._copies[number] = self._copier.submit(self._copy, number)
        self._sent = max(self._sent, layers)

    def _copy(self, number: int) -> Layer:
        parts = self.fetch.rows(number)[: self._count]
        began = perf_counter()
        rest = {name: one.clone() for name, one in parts.pop().items()} if self._rest else {}
        rows = _on_device(parts, self._on) if self._on.type == "cuda" else joined(parts)
        self._spans.append((began, perf_counter()))
        return rows, rest

    def _fail(self, error: Exception) -> NoReturn:
        raise self._lost(self, error) from error


def _on_device(parts: Sequence[Rows], on: torch.device) -> Rows:
    """On a stream of its own, beside the model's; the copies are complete."""
    with torch.cuda.stream(torch.cuda.Stream(on)) as stream:
        rows = joined([{name: one.to(on, non_blocking=True) for name, one in part.items()} for part in parts])
        stream.synchronize()
    return rows


def _handed_over(layer: Layer) -> Layer:
    """Its memory is not given away before the asking stream has done what it was asked."""
    for one in layer[0].values():
        if one.is_cuda:
            one.record_stream(torch.cuda.current_stream(one.device))
    return layer


def _covered(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of them ran."""
    total, reached = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
