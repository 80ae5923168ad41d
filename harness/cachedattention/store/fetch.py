"""The blocks of one session on their way from disk into memory, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from threading import Condition
from time import perf_counter

from harness.cachedattention.store.block import Block, BlockFile, by_layer
from harness.cachedattention.store.lanes import StoreLanes
from methods.tiers.block import Tensors
from methods.tiers.lanes import Spans, TransferLane
from methods.tiers.rows import Place
from methods.tiers.tier import HOST


class Fetch:
    """A read of one session's blocks. Any number of threads may `work` at it; they take the layers in order. Others
    wait for the rows of one layer or for all blocks, and get the error that ended the work (`LOST` names those of a
    disk). Blocks that lie in memory are taken as they are, others are read into host memory of `place`. `layers`: so
    many are read for now; None: all. `users`: so many hand out its rows."""

    def __init__(
        self,
        parts: Sequence[Block],
        path: Callable[[Block], Path],
        place: Place,
        layers: int | None = None,
        lanes: StoreLanes | None = None,
    ) -> None:
        self._parts, self._path, self._place, self._lanes = list(parts), path, place, lanes
        self._changed = Condition()
        self._files: list[BlockFile | None] = []  # None: lies in memory
        self._names: list[dict[int, list[str]]] = []  # of each block, by layer
        self._layers: list[int] | None = None  # once the files are open
        self._left: Iterator[int] = iter(())
        self._taken, self._allowed = 0, layers
        self._rows: dict[int, Future[list[Tensors]]] = {}  # of each layer, block by block
        self._error: Exception | None = None
        self.users, self._unread = 0, sum(part.size for part in self._parts if part.rows is None)
        self.spans = Spans()  # in which a layer was read

    def work(self) -> None:
        """Read layers until none is left to be taken."""
        try:
            while (layer := self._next()) is not None:
                began = perf_counter()
                rows = [self._read(place, layer) for place in range(len(self._parts))]
                with self._changed:
                    self.spans.add(began, perf_counter())
                    self._unread -= sum(
                        x.nbytes for part, file in zip(rows, self._files, strict=True) if file for x in part.values()
                    )
                    if not self._rows[layer].done():
                        self._rows[layer].set_result(rows)
                    self._changed.notify_all()
        except Exception as error:
            self._end(error)

    def cancel(self) -> int:
        """Stop, since nobody will ask for what has not been read; return the bytes of that in files."""
        self._end(CancelledError())
        return self._unread

    def go_on(self, layers: int | None = None, reader: TransferLane | None = None) -> None:
        """Allow so many layers to be read by now, None for all. `reader` reads them, by default the lane of what jobs
        wait for."""
        with self._changed:
            known = self._allowed
            self._allowed = None if layers is None or known is None else max(known, layers)
        if self._lanes is not None and not self.finished:
            for _ in range(1 if reader else self._lanes.count):
                (reader or self._lanes.reading).submit(self.work)

    def to_the_end(self) -> None:
        """Allow all layers, without waiting for a job that begins with them."""
        if self.halted:
            self.go_on()

    @property
    def halted(self) -> bool:
        """Return whether some layers may not be read yet."""
        return self._allowed is not None and not self.finished

    @property
    def finished(self) -> bool:
        return self._error is not None or (self._layers is not None and all(map(Future.done, self._rows.values())))

    @property
    def reads_disk(self) -> bool:
        """Return whether blocks are still being read from disk."""
        return not self.finished and any(part.rows is None for part in self._parts)

    def brings(self, parts: Sequence[Block]) -> bool:
        """Return whether this reads all of `parts` that do not lie in memory."""
        return {part.name for part in parts if part.rows is None} <= {part.name for part in self._parts}

    def layers(self) -> list[int]:
        """Wait for the heads of the files; return the numbers of the layers."""
        self._await(lambda: self._layers is not None)
        return self._layers or []

    def rows(self, layer: int) -> Future[list[Tensors]]:
        """Return the rows of a layer, block by block, which are complete once they are there."""
        return self._rows[layer]

    def blocks(self) -> list[Block]:
        """Wait for the end; return the blocks with all their rows."""
        self.wait()
        if self._error:
            raise self._error
        layers = [self._rows[layer].result() for layer in self._layers or ()]
        return [
            replace(
                part,
                rows={name: x for rows in layers for name, x in rows[place].items()},
                tier=HOST if part.rows is None else part.tier,
            )
            for place, part in enumerate(self._parts)
        ]

    def wait(self) -> None:
        """Wait for the end, good or bad, after which no file is read any more."""
        with self._changed:
            self._changed.wait_for(lambda: self.finished)

    def _next(self) -> int | None:
        with self._changed:
            if self._layers is None and self._error is None:
                self._open()
            if self._error or (self._allowed is not None and self._taken >= self._allowed):
                return None
            self._taken += 1
            return next(self._left, None)

    def _open(self) -> None:
        """Open all files, and so find missing, short and foreign ones before anything is promised."""
        self._files = [None if part.rows is not None else BlockFile(self._path(part), part) for part in self._parts]
        both = zip(self._parts, self._files, strict=True)
        self._names = [by_layer(file.names if file else part.rows or ()) for part, file in both]
        self._layers = sorted({layer for names in self._names for layer in names})
        self._left = iter(self._layers)
        self._rows = {layer: Future() for layer in self._layers}
        self._changed.notify_all()

    def _read(self, place: int, layer: int) -> Tensors:
        names, file = self._names[place].get(layer, []), self._files[place]
        if file is not None:
            return file.read(names, self._place)
        return {name: (self._parts[place].rows or {})[name] for name in names}

    def _await(self, there: Callable[[], bool]) -> None:
        """Wait until `there()` holds; raise the error that ended the work before."""
        with self._changed:
            self._changed.wait_for(lambda: there() or self._error)
            if self._error and not there():
                raise self._error

    def _end(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            for rows in self._rows.values():
                if not rows.done():
                    rows.set_exception(self._error)
            self._changed.notify_all()
