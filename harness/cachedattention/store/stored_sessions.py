"""The rows of sessions, where their placement says that they lie: in memory, or in the files of a disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

from harness.cachedattention.store.block import LOST, Block, Loss, covered, has_rest, length, loss_by
from harness.cachedattention.store.disk import Disk, warn
from harness.cachedattention.store.fetch import Fetch
from harness.cachedattention.store.fingerprint import EXACT, cut_lineage
from harness.cachedattention.store.lanes import StoreLanes, WriteBuffer
from harness.cachedattention.store.placement import Move, Placement, in_order
from harness.cachedattention.store.statistics import MeasuredSpeeds, Statistics
from harness.cachedattention.store.upload import UploadToHost, arriving, failed
from methods.tiers.lanes import TransferLane
from methods.tiers.rows import Place
from methods.tiers.tier import DEVICE, DISK

Written = tuple[int, list[Block]]  # bytes written; the session's blocks as they lie on disk


class StoredSessions:
    """The blocks of sessions by key, the lineages of their rows, and why those that are gone are. It carries out what
    `placement` decides. What fails on its way is lost: forgotten, with a warning.

    One thread decides, and `blocks` is its view: blocks have rows until these are known to lie on disk, so what waits
    to be written is found. Other threads bring rows from the device (`leaving`), read files (`fetches`) and, in the
    order of the decisions, change the disk (`saving`). Whatever needs rows that are still on their way waits for them.
    """

    def __init__(
        self,
        placement: Placement,
        disk: Disk | None,
        lanes: StoreLanes,
        *,
        place: Place,
        write_buffer: int,
        clock: Callable[[], float],
    ) -> None:
        self.blocks: dict[str, list[Block]] = {}
        self.lineages: dict[str, str] = {}
        self.losses: dict[str, Loss] = {}
        self.placement, self.disk, self.lanes, self.place, self.clock = placement, disk, lanes, place, clock
        self.statistics, self.speeds = Statistics(), MeasuredSpeeds()
        self.leaving = WriteBuffer(lanes.leaving, write_buffer, self.statistics)
        self.saving = WriteBuffer(lanes.writing, write_buffer, self.statistics)
        self.fetches: dict[str, Fetch] = {}
        self._uploads: deque[tuple[str, UploadToHost]] = deque()
        self._away: dict[str, object] = {}  # sessions on disk, or on their way there: by which write

    def restore(self, key: str, parts: list[Block], lineage: str) -> None:
        """Take over a session that an earlier process has left on disk."""
        self.blocks[key], self.lineages[key] = parts, lineage
        self._away[key] = None

    def of(self, key: str, lineage: str) -> list[Block]:
        """Return the session's blocks, if they are of that lineage."""
        return self.blocks.get(key, []) if self.lineages.get(key) == lineage else []

    def until(self, key: str, end: int, lineage: str) -> list[Block] | None:
        """Return the blocks that hold the first `end` tokens, or None where no block ends there."""
        known = self.of(key, lineage)
        return next((known[:count] for count in range(len(known) + 1) if length(known[:count]) == end), None)

    def covered(self, key: str, tokens: Sequence[int], lineage: str) -> int:
        """Return how many blocks of the session, from the first on, serve a text that begins with `tokens`."""
        parts = self.of(key, lineage)
        count = covered(parts, tokens)
        return 0 if has_rest(parts) and count < len(parts) else count

    def known(self, key: str, tokens: Sequence[int], lineage: str) -> int:
        """Return how many of `tokens` the blocks hold that `covered` counts."""
        return length(self.of(key, lineage)[: self.covered(key, tokens, lineage)])

    def longest(self, own: str, tokens: Sequence[int]) -> str:
        """Return the session that holds most of what `tokens` begin with, `own` where no other one holds more."""
        best, most = own, self.known(own, tokens, EXACT)
        for key, parts in self.blocks.items():
            if not has_rest(parts) and (known := self.known(key, tokens, EXACT)) > most:
                best, most = key, known
        return best

    def cut(self, key: str, kept: list[Block], dropped: int) -> None:
        """Make `kept` the session, which has lost its first `dropped` tokens."""
        if dropped:
            text = [token for block in self.blocks[key] for token in block.tokens]
            self.lineages[key] = cut_lineage(self.lineages[key], text, dropped)
        self.blocks[key] = kept
        self.placement.shrink(key, sum(block.size for block in kept))
        self._settle(key)

    def collect(self) -> None:
        """Take note of what other threads have done by now."""
        self.leaving.collect()
        while self._uploads and self._uploads[0][1].finished:
            key, upload = self._uploads.popleft()
            self.statistics.leaving_s += upload.spans.seconds
            self.statistics.leaving_hidden_s += upload.hidden_s
            parts = self.blocks.get(key, [])
            if upload.error is not None and any(failed(block.rows) for block in parts):
                self.lose(key, upload.error)
            elif parts and self.placement.tier(key) == DEVICE:
                self.blocks[key] = self._placed(key, parts)
        self.saving.collect()
        for key in [key for key, fetch in self.fetches.items() if fetch.finished]:
            self._attempt(key, self._arrive)

    def hold(self, key: str, parts: list[Block], lineage: str, moves: Sequence[Move]) -> None:
        """Make `parts` the session, and carry out the moves of its placement."""
        self.blocks[key], self.lineages[key] = parts, lineage
        self.losses.pop(key, None)
        if self.placement.tier(key) not in (DISK, None):
            self._attempt(key, self._load)  # first: its files may make room
        self.carry_out([move for move in moves if move.session != key])
        if key in self.placement.items:
            self._settle(key)
        elif key in self.blocks:
            self.statistics.refused += 1
            self._forget(key, Loss.NO_ROOM)

    def follow(self, key: str, uploads: Sequence[UploadToHost], began: float) -> None:
        """Follow rows of the session that are on their way from the device. The caller, who has waited since `began`,
        waits for what is more than the write buffer."""
        for upload in uploads:
            self._uploads.append((key, upload))
            for future, size in upload.layers:
                self.leaving.follow(future, Future.result, size)
        for _, upload in self._uploads:
            upload.waited(began)

    def carry_out(
        self, moves: Sequence[Move], reader: TransferLane | None = None, dropped_for: Loss = Loss.NO_ROOM
    ) -> None:
        """Carry out the moves. `reader` brings what comes from disk, by default one that a job waits for."""
        for move in in_order(moves):
            if move.session not in self.blocks:
                continue
            if move.target is None:
                self.statistics.dropped += 1
                self._forget(move.session, dropped_for)
            else:
                self.statistics.moved[move.source, move.target] += move.size
                self._attempt(move.session, self._write if move.target == DISK else partial(self._load, reader=reader))
        self.collect()

    def fetch(self, key: str, reader: TransferLane | None = None, layers: int | None = None) -> Fetch:
        """Read what lies on disk, at most so many layers for now. Where it is read already, ahead of its job, this adds
        to what may be read."""
        fetch = self.fetches.get(key)
        if fetch is None:
            parts = self.blocks[key]
            away = sum(block.size for block in parts if block.rows is None)
            fetch = self.fetches[key] = Fetch(parts, self._path, self.place, layers if away else None, self.lanes)
            self.statistics.read_bytes += away
        fetch.go_on(layers, reader)
        return fetch

    def give_up(self, key: str, fetch: Fetch) -> None:
        """Note that one of those who hand out rows of `fetch` stops. If it was the last one, and a job never began with
        the session, what has not been read is not."""
        fetch.users -= 1
        if not fetch.users and fetch.halted:
            if self.fetches.get(key) is fetch:
                del self.fetches[key]
            self.statistics.read_bytes -= fetch.cancel()

    def use(self, key: str, fetch: Fetch) -> str | None:
        """Begin a job with the session, whose rows `fetch` has begun to read: what that brings is not read again.
        Return the tier where the session is found now, or None where it has left since."""
        self.collect()
        if (tier := self.found_in(key)) is not None:
            if fetch.brings(self.blocks[key]):
                self.fetches.setdefault(key, fetch)
            self.carry_out(self.placement.use(key, self.clock()))
            self._change(lambda disk: disk.touch(key))
        return tier

    def found_in(self, key: str) -> str | None:
        """Return the tier that the session's rows come from: what is still on its way from disk is found there."""
        fetch = self.fetches.get(key)
        return DISK if fetch is not None and fetch.reads_disk else self.placement.tier(key)

    def read(self, parts: Sequence[Block]) -> list[Block]:
        """Return the blocks with their rows, from wherever these lie. Raise one of `LOST` where they cannot be read."""
        fetch = Fetch(parts, self._path, self.place)
        fetch.work()
        self.statistics.read_bytes += sum(block.size for block in parts if block.rows is None)
        return fetch.blocks()

    def lose(self, key: str, error: Exception) -> None:
        """Forget a session whose rows cannot be had, with a warning."""
        self.statistics.lost += 1
        warn(f"the stored history of session {key.partition('/')[2]!r} is lost and will be computed again: {error}")
        if key in self.placement.items:
            self.placement.drop(key)
        self._forget(key, loss_by(error))

    def flush(self) -> None:
        """Wait until all is on disk that is on its way there."""
        for key in [key for key, fetch in self.fetches.items() if not fetch.halted]:
            self._attempt(key, self._arrive)
        self.leaving.drain()
        self.collect()
        self.saving.drain()

    def close(self) -> None:
        """Leave on disk what has room there, the most recently used first, and end all threads."""
        if self.disk is not None:
            self.flush()
            on_disk = sum(tier.bytes for tier in self.placement.levels if tier.name == DISK)
            free, fits = self.disk.files.capacity - on_disk, list[str]()
            for key, item in reversed(self.placement.items.items()):
                if self.placement.tier(key) != DISK and item.size <= free:
                    free -= item.size
                    fits.append(key)
            for key in reversed(fits):
                self._attempt(key, self._write)
            self.saving.drain()
            self.disk.close()
            self.disk = None
        self.lanes.close()
        self.blocks.clear()  # and with them the memory of their rows
        self.fetches.clear()

    def _settle(self, key: str) -> None:
        """Bring what is new of a session to where the session lies."""
        self._attempt(key, self._write if self.placement.tier(key) == DISK else self._load)

    def _attempt(self, key: str, action: Callable[[str], None]) -> None:
        try:
            action(key)
        except LOST as error:
            self.lose(key, error)

    def _write(self, key: str) -> None:
        """Write the session into files; its rows in memory go as soon as these are there."""
        assert self.disk is not None
        self._arrive(key)
        self._away[key] = ticket = object()
        size = sum(block.size for block in self.blocks[key] if block.rows is not None)
        write = partial(self.disk.write, key, self.blocks[key], self.lineages[key])
        self.saving.submit(write, partial(self._written, key, ticket), size)

    def _written(self, key: str, ticket: object, future: Future[Written]) -> None:
        """Note the end of the write `ticket`. The session may have been brought back or replaced since it began."""
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

    def _load(self, key: str, reader: TransferLane | None = None) -> None:
        """Bring the session into memory of the tier it lies in; its files become a spare copy."""
        self._away.pop(key, None)
        fetch = None
        if any(block.rows is None for block in self.blocks[key]):
            fetch = self.fetch(key, reader)
        else:
            self.blocks[key] = self._placed(key, self.blocks[key])
        self._change(lambda disk: disk.files.spare(key), fetch)

    def _arrive(self, key: str) -> None:
        """Wait until a fetch of the session has ended; its rows stay if the session was brought into memory."""
        fetch = self.fetches.pop(key, None)
        if fetch is None:
            return
        fetch.to_the_end()
        blocks = {block.name: block for block in fetch.blocks()}
        if key in self.blocks and key not in self._away:
            self.blocks[key] = self._placed(key, [blocks.get(block.name, block) for block in self.blocks[key]])

    def _placed(self, key: str, parts: Sequence[Block]) -> list[Block]:
        """Return the blocks in the tier that the session lies in. Rows on their way to host memory come there first."""
        tier = self.placement.tier(key)
        assert tier is not None
        return [block if arriving(block.rows) else block.laid_in(tier, self.place) for block in parts]

    def _forget(self, key: str, loss: Loss) -> None:
        self.losses[key] = loss
        for known in (self.blocks, self.lineages, self._away):
            known.pop(key, None)
        fetch = self.fetches.pop(key, None)
        if fetch is not None and not fetch.users:
            self.statistics.read_bytes -= fetch.cancel()
        self._change(lambda disk: disk.drop(key), fetch)

    def _change(self, action: Callable[[Disk], None], fetch: Fetch | None = None) -> None:
        """Change the disk, once `fetch` has read all of the files that this concerns."""
        if (disk := self.disk) is None:
            return
        if fetch is not None:
            fetch.to_the_end()

        def change() -> None:
            if fetch is not None:
                fetch.wait()
            action(disk)

        self.saving.submit(change, Future.result)

    def _path(self, block: Block) -> Path:
        assert self.disk is not None
        return self.disk.path(block)
