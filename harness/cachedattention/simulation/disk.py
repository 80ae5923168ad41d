"""The simulated disk: what it holds, by the store's own accounts, and when it will have done what it was asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf

from harness.cachedattention.simulation.costs import Hardware
from harness.cachedattention.store.levels import Files


class SimulatedDisk:
    """Reads and writes one after the other, or with `disk_duplex` each beside the other. What waits to be written lies
    in memory until it is: more than `write_buffer` bytes of it make the caller wait, as in the store."""

    def __init__(self, capacity: int, hardware: Hardware, write_buffer: float = inf) -> None:
        self.files: Files[int] = Files(capacity)
        self.written_bytes = self.read_bytes = 0
        self._hardware, self._write_buffer = hardware, write_buffer
        self._read_s = self._write_s = 0.0  # when the last of them will be done
        self._waiting: deque[tuple[float, str, int]] = deque()  # done at, session, bytes
        self._held = 0  # bytes that wait
        self._rows: dict[str, int] = {}  # of these, by session, what is of use to it

    def read(self, session: str, size: int, now_s: float) -> float:
        """`size` bytes of a session that lies here. -> when they will be in memory"""
        self._collect(now_s)
        size -= min(size, self._rows.get(session, 0))
        self.read_bytes += size
        free_s = self._read_s if self._hardware.disk_duplex else max(self._read_s, self._write_s)
        self._read_s = max(now_s, free_s) + size / self._hardware.disk_bytes_per_s
        return self._read_s if size else now_s

    def write(self, session: str, blocks: Mapping[int, int], held: int, now_s: float) -> float:
        """`blocks`, names and bytes, are all of the session, and `held` bytes of rows stay in memory until what is new
        of them is written. -> until when the caller waits"""
        self._collect(now_s)
        self.files.make_room(session, blocks, self.files.drop)
        size = self.files.hold(session, blocks)
        self.written_bytes += size
        free_s = self._write_s if self._hardware.disk_duplex else max(self._read_s, self._write_s)
        self._write_s = max(now_s, free_s) + size / self._hardware.disk_bytes_per_s
        self._waiting.append((self._write_s, session, held))
        self._rows[session] = self._rows.get(session, 0) + held
        self._held += held
        while self._held > self._write_buffer:
            now_s = max(now_s, self._waiting[0][0])
            self._done()
        return now_s

    def drop(self, session: str) -> None:
        self.files.drop(session)
        self._rows.pop(session, None)

    def _collect(self, now_s: float) -> None:
        while self._waiting and self._waiting[0][0] <= now_s:
            self._done()

    def _done(self) -> None:
        _, session, held = self._waiting.popleft()
        self._held -= held
        left = self._rows.pop(session, 0) - held
        if left > 0:
            self._rows[session] = left
