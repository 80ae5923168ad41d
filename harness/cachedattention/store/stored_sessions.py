"""The rows of sessions where their placement says they lie: in memory, or in the files of a disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from harness.cachedattention.store.block import LOST, Block, Loss, Sessions, loss_by
from harness.cachedattention.store.disk import Disk, warn
from harness.cachedattention.store.fetch import Fetch
from harness.cachedattention.store.lanes import StoreLanes, WriteBuffer
from harness.cachedattention.store.placement import Move, Placement, in_order
from harness.cachedattention.store.statistics import MeasuredSpeeds, Statistics
from harness.cachedattention.store.upload import UploadToHost, arriving, failed
from methods.tiers.rows import Place
from methods.tiers.tier import DEVICE, DISK
from methods.tiers.transfer.lanes import TransferLane

Written = tuple[int, list[Block]]  # bytes written; the session's blocks as they lie on disk


class StoredSessions(Sessions):
    """Carries out what `placement` decides. What fails on its way is lost: forgotten, with a warning.

    One thread decides, and `sessions` is its view: blocks have rows until these are known to lie on disk, so what waits
    to be written is found. Others bring rows from the device (`leaving`), read files (`fetches`) and, in the order of
    the decisions, change the disk (`saving`). Whatever needs rows that are still on their way waits for them."""

    def __init__(
        self,
        placement: Placement,
        disk: Disk | None,
        lanes: StoreLanes,
        *,
        durable: bool,
        place: Place,
        write_buffer: int,
        clock: Callable[[], float],
    ) -> None:
        super().__init__()
        self.clock = clock
        self.placement, self.disk, self.lanes, self.durable, self.place = placement, disk, lanes, durable, place
        self.statistics, self.speeds = Statistics(), MeasuredSpeeds()
        self.leaving = WriteBuffer(lanes.leaving, write_buffer, self.statistics)
        self.saving = WriteBuffer(lanes.writing, write_buffer, self.statistics)
        self.fetches: dict[str, Fetch] = {}
        self._leavings: deque[tuple[str, UploadToHost]] = deque()
        self._away: dict[str, object] = {}  # sessions on disk, or on their way there: by which write

    def restore(self, key: str, parts: list[Block], lineage: str) -> None:
        """An earlier process has left it on disk."""
        self.sessions[key], self.lineages[key] = parts, lineage
        self._away[key] = None

    def collect(self) -> None:
        """What others have done by now."""
        self.leaving.collect()
        while self._leavings and self._leavings[0][1].finished:
            self._left(*self._leavings.popleft())
        self.saving.collect()
        for key in [key for key, fetch in self.fetches.items() if fetch.finished]:
            self.attempt(key, self.arrive)

    def hold(self, key: str, parts: list[Block], lineage: str, moves: Sequence[Move]) -> None:
        """The session is `parts` now, and `moves` are those of its placement."""
        self.sessions[key], self.lineages[key] = parts, lineage
        self.losses.pop(key, None)
        if self.placement.tier(key) not in (DISK, None):
            self.attempt(key, self.load)  # first: its files may make room
        self.carry_out([move for move in moves if move.session != key])
        if key in self.placement.items:
            self.settle(key)
        elif key in self.sessions:
            self.statistics.refused += 1
            self.forget(key, Loss.NO_ROOM)

    def follow(self, key: str, leavings: Sequence[UploadToHost], began: float) -> None:
        """Rows of the session that are on their way from the device. The caller, who has waited since `began`, waits
        for what is more than the write buffer."""
        for leaving in leavings:
            self._leavings.append((key, leaving))
            for future, size in leaving.layers:
                self.leaving.follow(future, Future.result, size)
        for _, leaving in self._leavings:
            leaving.waited(began)

    def carry_out(
        self, moves: Sequence[Move], reader: TransferLane | None = None, dropped_for: Loss = Loss.NO_ROOM
    ) -> None:
        """`reader` brings what comes from disk, by default one that a job waits for."""
        for move in in_order(moves):
            if move.session not in self.sessions:
                continue
            if move.target is None:
                self.statistics.dropped += 1
                self.forget(move.session, dropped_for)
            else:
                self.statistics.moved[move.source, move.target] += move.size
                action = self.write if move.target == DISK else partial(self.load, reader=reader)
                self.attempt(move.session, action)
        self.collect()

    def settle(self, key: str) -> None:
        """What is new of a session comes to where the session lies."""
        tier = self.placement.tier(key)
        self.attempt(key, self.write if tier == DISK else self.load)
        if tier != DISK and self.durable and self.disk and key in self.sessions:
            self.attempt(key, self._spare_copy)

    def attempt(self, key: str, action: Callable[[str], None]) -> None:
        try:
            action(key)
        except LOST as error:
            self.lose(key, error)

    def write(self, key: str) -> None:
        """Into files; the rows in memory go as soon as they are there."""
        self.arrive(key)
        self._away[key] = ticket = object()
        self._save(key, ticket, sum(block.size for block in self.sessions[key] if block.rows is not None))

    def load(self, key: str, reader: TransferLane | None = None) -> None:
        """Into memory, of the tier it lies in; the files become a spare copy."""
        self._away.pop(key, None)
        if any(block.rows is None for block in self.sessions[key]):
            fetch = self.fetch(key, reader)
            self._change(lambda disk: disk.files.spare(key), fetch)
        else:
            self.sessions[key] = self._placed(key, self.sessions[key])
            self._change(lambda disk: disk.files.spare(key))

    def fetch(self, key: str, reader: TransferLane | None = None, layers: int | None = None) -> Fetch:
        """Reads what lies on disk, so many layers for now; others that a job waits for help with one ahead of it."""
        fetch = self.fetches.get(key)
        if fetch is None:
            parts = self.sessions[key]
            away = sum(block.size for block in parts if block.rows is None)
            fetch = Fetch(parts, self._path, self.place, layers if away else None, self.lanes)
            self.fetches[key] = fetch
            self.statistics.read_bytes += away
        fetch.go_on(layers, reader)
        return fetch

    def give_up(self, key: str, fetch: Fetch) -> None:
        """One of those that hand out rows of `fetch` does not any more. If it was the last one, and a job never began
        with the session, what has not been read is not."""
        fetch.users -= 1
        if not fetch.users and fetch.halted:
            if self.fetches.get(key) is fetch:
                del self.fetches[key]
            self.statistics.read_bytes -= fetch.cancel()

    def use(self, key: str, fetch: Fetch) -> str | None:
        """A job begins with the session, whose rows `fetch` has begun to read: what that brings is not read again.
        -> the tier where the session is found now; None where it has left since"""
        self.collect()
        if (tier := self.found_in(key)) is not None:
            if fetch.brings(self.sessions[key]):
                self.fetches.setdefault(key, fetch)
            self.carry_out(self.placement.use(key, self.clock()))
            self._change(lambda disk: disk.touch(key))
        return tier

    def found_in(self, key: str) -> str | None:
        """The tier that its rows come from: what is still on its way from disk is found there."""
        fetch = self.fetches.get(key)
        return DISK if fetch is not None and fetch.reads_disk else self.placement.tier(key)

    def arrive(self, key: str) -> None:
        """Waits until a fetch of the session has ended; its rows stay if the session was brought into memory."""
        fetch = self.fetches.pop(key, None)
        if fetch is None:
            return
        fetch.to_the_end()
        blocks = {block.name: block for block in fetch.blocks()}
        if key in self.sessions and key not in self._away:
            self.sessions[key] = self._placed(key, [blocks.get(block.name, block) for block in self.sessions[key]])

    def read(self, parts: Sequence[Block]) -> list[Block]:
        """The blocks with their rows, from wherever these lie; raises one of `LOST`."""
        fetch = Fetch(parts, self._path, self.place)
        fetch.work()
        self.statistics.read_bytes += sum(block.size for block in parts if block.rows is None)
        return fetch.blocks()

    def lose(self, key: str, error: Exception) -> None:
        self.statistics.lost += 1
        warn(f"the stored history of session {key.partition('/')[2]!r} is lost and will be computed again: {error}")
        if key in self.placement.items:
            self.placement.drop(key)
        self.forget(key, loss_by(error))

    def forget(self, key: str, loss: Loss) -> None:
        self.losses[key] = loss
        self.sessions.pop(key, None)
        self.lineages.pop(key, None)
        self._away.pop(key, None)
        fetch = self.fetches.pop(key, None)
        if fetch is not None and not fetch.users:
            self.statistics.read_bytes -= fetch.cancel()
        self._change(lambda disk: disk.drop(key), fetch)

    def flush(self) -> None:
        """Waits until all is on disk that is on its way there."""
        for key in [key for key, fetch in self.fetches.items() if not fetch.halted]:
            self.attempt(key, self.arrive)
        self.leaving.drain()
        self.collect()
        self.saving.drain()

    def close(self) -> None:
        """Leaves on disk what has room there, the most recently used first."""
        if self.disk is not None:
            self.flush()
            self._save_the_last(self.disk)
            self.saving.drain()
            self.disk.close()
            self.disk = None
        self.lanes.close()
        self.sessions.clear()  # and with them the memory of their rows
        self.fetches.clear()

    def _placed(self, key: str, parts: Sequence[Block]) -> list[Block]:
        """In the tier that the session lies in. Rows on their way to host memory come there first."""
        tier = self.placement.tier(key)
        assert tier is not None
        return [block if arriving(block.rows) else block.laid_in(tier, self.place) for block in parts]

    def _left(self, key: str, leaving: UploadToHost) -> None:
        """Books rows that have left the device, and takes them to where the session lies."""
        self.statistics.leaving_s += leaving.spans.seconds
        self.statistics.leaving_hidden_s += leaving.hidden_s
        parts = self.sessions.get(key, [])
        if leaving.error is not None and any(failed(block.rows) for block in parts):
            self.lose(key, leaving.error)
        elif parts and self.placement.tier(key) == DEVICE:
            self.sessions[key] = self._placed(key, parts)

    def _spare_copy(self, key: str) -> None:
        self.arrive(key)
        if self.disk and self.placement.items[key].size <= self.disk.files.capacity - self._on_disk():
            self._save(key, None, sum(block.size for block in self.sessions[key] if block.file is None))
            self._change(lambda disk: disk.files.spare(key))

    def _save(self, key: str, ticket: object, size: int) -> None:
        assert self.disk is not None
        write = partial(self.disk.write, key, self.sessions[key], self.lineages[key])
        self.saving.submit(write, partial(self._saved, key, ticket), size)

    def _saved(self, key: str, ticket: object, future: Future[Written]) -> None:
        """`ticket`: of a session that was to leave memory; since then it may have been brought back or replaced."""
        leaves = ticket is not None and self._away.get(key) is ticket
        error = future.exception()
        if error is None:
            size, blocks = future.result()
            self.statistics.written_bytes += size
            if key in self.sessions:
                self.filed(key, {block.name: block for block in blocks}, leaves)
        elif not isinstance(error, LOST):
            raise error
        elif leaves:
            self.lose(key, error)
        elif key in self.sessions and key not in self._away:
            warn(f"session {key.partition('/')[2]!r} lies in memory alone: {error}")

    def _change(self, action: Callable[[Disk], None], fetch: Fetch | None = None) -> None:
        """`action`, once `fetch` has read all of the files that it concerns."""
        if (disk := self.disk) is None:
            return
        if fetch is not None:
            fetch.to_the_end()

        def change() -> None:
            if fetch is not None:
                fetch.wait()
            action(disk)

        self.saving.submit(change, Future.result)

    def _save_the_last(self, disk: Disk) -> None:
        free = disk.files.capacity - self._on_disk()
        fits: list[str] = []
        for key, item in reversed(self.placement.items.items()):
            if self.placement.tier(key) != DISK and item.size <= free:
                free -= item.size
                fits.insert(0, key)
        for key in fits:
            self.attempt(key, self.write)

    def _on_disk(self) -> int:  # bytes of the sessions there, spare copies aside
        return sum(tier.bytes for tier in self.placement.levels if tier.name == DISK)

    def _path(self, block: Block) -> Path:
        assert self.disk is not None
        return self.disk.path(block)
