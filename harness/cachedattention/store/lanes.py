"""The lanes in which a store's rows travel, of the engine that moves all rows of its device."""

from __future__ import annotations

from methods.tiers.transfer.engine import TransferEngine


class StoreLanes:
    """`reading` reads what a job waits for, in `count` threads, and `ahead` what the next jobs will; `copying` brings
    rows to the device, with those that the engine moves for caches, and `leaving` away from it; `writing` makes all
    changes on disk, in their order. With no threads the caller does everything itself, at once."""

    def __init__(self, engine: TransferEngine, count: int) -> None:
        self.engine, self.count, self.beside = engine, max(1, count), count > 0
        self.reading, self.ahead, self.writing = (
            engine.lane(name, number if count else 0) for name, number in (("read", count), ("ahead", 1), ("write", 1))
        )
        self.leaving = engine.lane("leave", 1 if count else 0)
        self.copying = engine.copy_lane if engine.beside or not count else engine.lane("copy", 1)

    def close(self) -> None:
        """Wait until all that was submitted is done, and end the store's own threads."""
        for lane in (self.leaving, self.writing, self.ahead, self.reading):
            lane.close()
        if self.copying is not self.engine.copy_lane:
            self.copying.close()
