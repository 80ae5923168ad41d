"""The keys and values of sessions (stored conversations), kept where their placement says: in
memory, or in the files of a disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from harness.cachedattention.store.block import (
    LOST,
    Block,
    BlockFile,
    Loss,
    by_layer,
    covered,
    has_rest,
    loss_by,
)
from harness.cachedattention.store.block import length as length_of
from harness.cachedattention.store.disk import Disk, warn
from harness.cachedattention.store.placement import Move, Placement, in_order
from harness.cachedattention.store.statistics import MeasuredSpeeds, Statistics
from harness.cachedattention.store.upload import ArrivingRows, UploadToHost
from methods.tiers.block import Tensors
from methods.tiers.lanes import Spans, TransferLane
from methods.tiers.rows import Place
from methods.tiers.tier import DISK
from methods.tiers.transfer import TransferEngine

T = TypeVar("T")


Written = tuple[int, list[Block]]  # bytes written; the session's blocks as they lie on disk


class WriteBuffer:
    """Hold a queue of tasks for the thread `worker`. The rows that wait in it may take `capacity`
    bytes; a caller who submits more waits until there is room. Callbacks on finished tasks run in
    the caller's own thread, when it calls `collect`, `drain` or one of the other methods."""

    def __init__(self, worker: TransferLane, capacity: int, statistics: Statistics) -> None:
        self._worker, self._capacity, self._statistics = worker, capacity, statistics
        self._changes: deque[tuple[Future[Any], int, Callable[[Future[Any]], None]]] = deque()
        self.held = 0

    def submit(
        self, action: Callable[[], T], finished: Callable[[Future[T]], None], size: int = 0
    ) -> None:
        """Run `action` in the worker after all that were submitted before, and call `finished` with
        its future afterwards. `size`: bytes of rows that wait for it in memory."""
        self.follow(self._worker.submit(action), finished, size)

    def follow(self, future: Future[T], finished: Callable[[Future[T]], None], size: int) -> None:
        """Track `future`, which was submitted elsewhere, as `submit` does with its own: count
        `size` bytes until it is done, then call `finished` with it."""
        self._changes.append((future, size, finished))
        self.held += size
        self.collect()
        if self.held > self._capacity:
            began = perf_counter()
            while self._changes and self.held > self._capacity:
                self._finish_oldest()
            self._statistics.write_waits += 1
            self._statistics.write_wait_s += perf_counter() - began

    def collect(self) -> None:
        """Call `finished` for every task that is done by now, in order, up to the first that is
        not."""
        while self._changes and self._changes[0][0].done():
            self._finish_oldest()

    def drain(self) -> None:
        """Wait until all tasks are done, and call `finished` for each."""
        while self._changes:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Wait for the oldest task and call its `finished`, which may submit more tasks."""
        future, size, finished = self._changes.popleft()
        future.exception()  # waits
        self.held -= size
        finished(future)


class Fetch:
    """A read of one session's blocks (consecutive tokens with their keys and values) into host
    memory, layer by layer, in another thread (that of `lane`). `rows` has a future per layer, which
    gives one dictionary of tensors per block. Blocks that lie in memory are taken as they are,
    others are read from the files that `path` names. A file that is missing (OSError), too short or
    of another block (`DamagedBlock`) raises before any read begins."""

    def __init__(
        self,
        parts: Sequence[Block],
        path: Callable[[Block], Path],
        place: Place,
        lane: TransferLane,
    ) -> None:
        self._parts, self._place = list(parts), place
        self._files = [BlockFile(path(part), part) if part.rows is None else None for part in parts]
        both = zip(self._parts, self._files, strict=True)
        names = [by_layer(file.names if file else part.rows or ()) for part, file in both]
        self.spans = Spans()  # in which a layer was read
        self.layers = sorted({layer for named in names for layer in named})
        self.rows: dict[int, Future[list[Tensors]]] = {
            layer: lane.submit(partial(self._read, [named.get(layer, []) for named in names]))
            for layer in self.layers
        }

    @property
    def finished(self) -> bool:
        return all(rows.done() for rows in self.rows.values())

    @property
    def reads_disk(self) -> bool:
        """Return whether blocks of the session are still being read from disk."""
        return not self.finished and any(part.rows is None for part in self._parts)

    def brings(self, parts: Sequence[Block]) -> bool:
        """Return whether this fetch reads all those of `parts` whose rows do not lie in memory."""
        return {part.name for part in parts if part.rows is None} <= {
            part.name for part in self._parts
        }

    def blocks(self) -> list[Block]:
        """Wait until all layers are read; return the session's blocks with their rows in memory."""
        layers = [rows.result() for rows in self.rows.values()]
        return [
            replace(part, rows={name: x for rows in layers for name, x in rows[place].items()})
            for place, part in enumerate(self._parts)
        ]

    def _read(self, names: Sequence[Sequence[str]]) -> list[Tensors]:
        began = perf_counter()
        try:
            return [
                file.read(own, self._place)
                if file
                else {name: (part.rows or {})[name] for name in own}
                for part, file, own in zip(self._parts, self._files, names, strict=True)
            ]
        finally:
            self.spans.add(began, perf_counter())


class StoredSessions:
    """The contents of a store: for each session (a stored conversation, by key) its blocks of
    tokens with keys and values, the lineage of these (a hash of what was dropped or recomputed
    before them), and for sessions that are gone the reason. It carries out the moves that
    `placement` decides. A session whose move fails is lost: forgotten, with a warning.

    One thread decides, and `blocks` is its view: a block has rows in memory until it is known to
    lie on disk, so what waits to be written can be found. Other threads bring rows from the device
    (`leaving`), read files (`fetches`), copy rows to the device (`copying`) and, in the order of
    the decisions, change the disk (`saving`). With 0 `threads` the caller does everything itself,
    at once. Whatever needs rows that are still on their way waits for them."""

    def __init__(
        self,
        placement: Placement,
        disk: Disk | None,
        engine: TransferEngine,
        *,
        threads: int,
        place: Place,
        write_buffer: int,
        clock: Callable[[], float],
    ) -> None:
        self.blocks: dict[str, list[Block]] = {}
        self.lineages: dict[str, str] = {}
        self.losses: dict[str, Loss] = {}
        self.placement, self.disk, self.place, self.clock = placement, disk, place, clock
        self.statistics, self.speeds = Statistics(), MeasuredSpeeds()
        few = min(threads, 1)
        self._reading, self._ahead = engine.lane("read", threads), engine.lane("ahead", few)
        self.copying = engine.copy_lane if engine.beside or not threads else engine.lane("copy", 1)
        self.leaving_lane, writing = engine.lane("leave", few), engine.lane("write", few)
        self._own = [self.leaving_lane, writing, self._ahead, self._reading]
        self._own += [self.copying] if self.copying is not engine.copy_lane else []
        self.leaving = WriteBuffer(self.leaving_lane, write_buffer, self.statistics)
        self.saving = WriteBuffer(writing, write_buffer, self.statistics)
        self.fetches: dict[str, Fetch] = {}
        self._uploads: deque[tuple[str, UploadToHost]] = deque()
        # sessions on disk, or on their way there: by which write
        self._away: dict[str, object] = {}
        # of an earlier process
        for key, session, used_s in disk.restored(self.clock()) if disk is not None else ():
            self.blocks[key], self.lineages[key] = list(session.blocks), session.lineage
            self._away[key] = None
            moves = self.placement.save(
                key, sum(block.size for block in session.blocks), used_s, fastest=DISK
            )
            self.carry_out([move for move in moves if move.target is None])

    def covered(self, key: str, tokens: Sequence[int], lineage: str) -> list[Block]:
        """Return the session's blocks, from the first on, whose tokens are those that `tokens`
        begin with; none where the session has another `lineage` (a hash of what was dropped or
        recomputed before its rows). A session with a rest (tensors that belong to all tokens)
        matches as a whole or not at all."""
        parts = self._known(key, lineage)
        count = covered(parts, tokens)
        return [] if has_rest(parts) and count < len(parts) else parts[:count]

    def until(self, key: str, end: int, lineage: str) -> list[Block] | None:
        """Return the blocks that hold exactly the first `end` tokens of the session. Return None if
        no block ends there, or if the session has another `lineage` (a hash of what was dropped or
        recomputed before its rows)."""
        known = self._known(key, lineage)
        return next(
            (known[:count] for count in range(len(known) + 1) if length_of(known[:count]) == end),
            None,
        )

    def _known(self, key: str, lineage: str) -> list[Block]:
        return self.blocks.get(key, []) if self.lineages.get(key) == lineage else []

    def collect(self) -> None:
        """Take note of what other threads have finished by now: uploads from the device, writes to
        disk, and reads from it."""
        self.leaving.collect()
        while self._uploads and self._uploads[0][1].finished:
            key, upload = self._uploads.popleft()
            if key in self.blocks:
                self.attempt(key, self._take_arrived)
            upload.release()
        self.saving.collect()
        for key in [key for key, fetch in self.fetches.items() if fetch.finished]:
            self.attempt(key, self._arrive)

    def _take_arrived(self, key: str) -> None:
        """Replace rows of the session that have arrived from the device by plain tensors, so that
        their upload can be let go. Raise `NotSaved` where rows did not come."""
        self.blocks[key] = [
            replace(block, rows=dict(block.rows))
            if isinstance(block.rows, ArrivingRows) and block.rows.done
            else block
            for block in self.blocks[key]
        ]

    def hold(self, key: str, parts: list[Block], lineage: str, moves: Sequence[Move]) -> None:
        """Make `parts` all blocks of the session, with `lineage` (a hash of what was dropped or
        recomputed before these rows), and carry out `moves`, which the placement decided for it."""
        self.blocks[key], self.lineages[key] = parts, lineage
        self.losses.pop(key, None)
        if self.placement.tier(key) not in (DISK, None):
            self.attempt(key, self._load)  # first: its files may make room
        self.carry_out([move for move in moves if move.session != key])
        if key in self.placement.items:
            self.settle(key)
        elif key in self.blocks:
            self.statistics.refused += 1
            self._forget(key, Loss.NO_ROOM)

    def settle(self, key: str) -> None:
        """Bring blocks of a session that lie elsewhere into the session's tier: write them to disk,
        or read them from it."""
        self.attempt(key, self._write if self.placement.tier(key) == DISK else self._load)

    def follow(self, key: str, uploads: Sequence[UploadToHost], began: float) -> None:
        """Follow `uploads`, which copy rows of the session from the device to host memory. The
        caller, who has waited since `began`, waits here while more bytes are on their way than the
        write buffer holds."""
        for upload in uploads:
            self._uploads.append((key, upload))
            for future, size in upload.layers.values():
                # whoever reads the rows finds out whether they came
                self.leaving.follow(future, lambda _: None, size)
        for _, upload in self._uploads:
            upload.waited(began)

    def carry_out(
        self, moves: Sequence[Move], *, ahead: bool = False, dropped_for: Loss = Loss.NO_ROOM
    ) -> None:
        """Carry out moves of sessions (stored conversations) between tiers. `ahead`: no turn waits
        yet for what is read from disk, so a thread of its own reads it. `dropped_for`: the reason
        to record for sessions that leave the store."""
        for move in in_order(moves):
            if move.session not in self.blocks:
                continue
            if move.target is None:
                self.statistics.dropped += 1
                self._forget(move.session, dropped_for)
            else:
                self.statistics.moved[move.source, move.target] += move.size
                self.attempt(
                    move.session,
                    self._write if move.target == DISK else partial(self._load, ahead=ahead),
                )
        self.collect()

    def fetch(self, key: str, *, ahead: bool = False) -> Fetch:
        """Return the read of the session's blocks into host memory, which begins now unless it has
        before. `ahead`: no turn waits for it yet, so a thread of its own reads."""
        if key not in self.fetches:
            parts, lane = self.blocks[key], self._ahead if ahead else self._reading
            self.fetches[key] = Fetch(parts, self._path, self.place, lane)
            self.statistics.read_bytes += sum(block.size for block in parts if block.rows is None)
        return self.fetches[key]

    def use(self, key: str, fetch: Fetch) -> str | None:
        """Begin a turn that goes on with the session. `fetch` has begun to read its rows; what it
        brings is not read again. Return the tier where the session is found now, or None where it
        has left the store since."""
        self.collect()
        if (tier := self.found_in(key)) is not None:
            if fetch.brings(self.blocks[key]):
                self.fetches.setdefault(key, fetch)
            self.carry_out(self.placement.use(key, self.clock()))
            self._change(lambda disk: disk.touch(key))
        return tier

    def found_in(self, key: str) -> str | None:
        """Return the tier that the session's rows come from, None where it is not stored. Rows that
        are still being read from disk come from disk, though the placement has them in host memory
        already."""
        fetch = self.fetches.get(key)
        return DISK if fetch is not None and fetch.reads_disk else self.placement.tier(key)

    def read(self, part: Block) -> Block:
        """Return the block with its rows in memory, read from its file where needed. Raise OSError,
        `DamagedBlock` or `NotSaved` where they cannot be read."""
        if part.rows is None:
            self.statistics.read_bytes += part.size
        [block] = Fetch([part], self._path, self.place, self._reading).blocks()
        return block

    def lose(self, key: str, error: Exception) -> None:
        """Forget a session, with a warning, because `error` kept its rows from being read, written
        or copied."""
        self.statistics.lost += 1
        warn(
            f"the stored history of session {key.partition('/')[2]!r} is lost and will be computed again: {error}"
        )
        if key in self.placement.items:
            self.placement.drop(key)
        self._forget(key, loss_by(error))

    def flush(self) -> None:
        """Wait until all reads have ended and everything that is on its way to disk is there."""
        for key in list(self.fetches):
            self.attempt(key, self._arrive)
        self.leaving.drain()
        self.collect()
        self.saving.drain()

    def close(self) -> None:
        """Write to disk the sessions that have room there, the most recently used first, and end
        all threads."""
        if self.disk is not None:
            self.flush()
            on_disk = sum(tier.bytes for tier in self.placement.levels if tier.name == DISK)
            free, fits = self.disk.files.capacity - on_disk, list[str]()
            for key, item in reversed(self.placement.items.items()):
                if self.placement.tier(key) != DISK and item.size <= free:
                    free -= item.size
                    fits.append(key)
            for key in reversed(fits):
                self.attempt(key, self._write)
            self.saving.drain()
            self.disk.close()
            self.disk = None
        for lane in self._own:
            lane.close()
        self.collect()
        self.blocks.clear()  # and with them the memory of their rows
        self.fetches.clear()

    def attempt(self, key: str, action: Callable[[str], None]) -> None:
        try:
            action(key)
        except LOST as error:
            self.lose(key, error)

    def _write(self, key: str) -> None:
        """Begin to write the session's blocks into files; their rows in memory are let go as soon
        as the files are there."""
        assert self.disk is not None
        self._arrive(key)
        self._away[key] = ticket = object()
        size = sum(block.size for block in self.blocks[key] if block.rows is not None)
        write = partial(self.disk.write, key, self.blocks[key], self.lineages[key])
        self.saving.submit(write, partial(self._written, key, ticket), size)

    def _written(self, key: str, ticket: object, future: Future[Written]) -> None:
        """Note that a write of the session has ended, for which `future` has its result. Unless the
        session has been brought back into memory or written anew since, which `ticket` tells, its
        rows in memory are let go."""
        leaves = self._away.get(key) is ticket
        error = future.exception()
        if error is None:
            size, blocks = future.result()
            self.statistics.written_bytes += size
            files = {block.name: block.file for block in blocks}
            if key in self.blocks:  # a new list, since the old one may be on its way into files
                self.blocks[key] = [
                    replace(block, rows=None if leaves else block.rows, file=files[block.name])
                    if block.name in files
                    else block
                    for block in self.blocks[key]
                ]
        elif not isinstance(error, LOST):
            raise error
        elif leaves:
            self.lose(key, error)

    def _load(self, key: str, *, ahead: bool = False) -> None:
        """Bring the session from disk into memory; its files stay as a spare copy. `ahead`: no turn
        waits for it yet."""
        self._away.pop(key, None)
        away = any(block.rows is None for block in self.blocks[key])
        fetch = self.fetch(key, ahead=ahead) if away else None
        self._change(lambda disk: disk.files.spare(key), fetch)

    def _arrive(self, key: str) -> None:
        """Wait until the session's read from disk has ended, and keep the rows in memory if the
        session belongs there now."""
        fetch = self.fetches.pop(key, None)
        if fetch is None:
            return
        blocks = {block.name: block for block in fetch.blocks()}
        if key in self.blocks and key not in self._away:
            self.blocks[key] = [blocks.get(block.name, block) for block in self.blocks[key]]

    def _forget(self, key: str, loss: Loss) -> None:
        self.losses[key] = loss
        for known in (self.blocks, self.lineages, self._away):
            known.pop(key, None)
        self._change(lambda disk: disk.drop(key), self.fetches.pop(key, None))

    def _change(self, action: Callable[[Disk], None], fetch: Fetch | None = None) -> None:
        """Let the thread that writes call `action` with the disk, after all changes before it, and
        only once `fetch` has read the files that `action` may remove."""
        if (disk := self.disk) is None:
            return

        def change() -> None:
            if fetch is not None:
                wait(fetch.rows.values())
            action(disk)

        self.saving.submit(change, Future.result)

    def _path(self, block: Block) -> Path:
        assert self.disk is not None
        return self.disk.path(block)
