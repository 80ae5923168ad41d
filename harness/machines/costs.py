"""What the lanes of a machine take: the table of costs by which a schedule is replayed."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from harness.machines.schedule import DISK_LANE, TO_DEVICE, TO_HOST, Lane, Operation, Submitted


@dataclass(frozen=True, slots=True)
class LinkCost:
    """A way for bytes, one transfer after the other: `latency_s` and what its pieces and its bytes take."""

    bytes_s: float = inf  # bytes per second
    latency_s: float = 0.0
    piece_s: float = 0.0

    def seconds(self, nbytes: int, pieces: int) -> float:
        return self.latency_s + pieces * self.piece_s + nbytes / self.bytes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Speeds of every lane. An operation takes its launch and the longer of its bytes and its arithmetic; a layer takes
    `layer_s` beside its operations. While a gather runs the device computes `gather_slows` times as slowly. Where no
    other thread moves rows to the device, as on a CPU with links, the device itself copies `copied_bytes_s`, which the
    link does not wait for."""

    read_bytes_s: float = inf
    flop_s: float = inf
    launch_s: float = 0.0
    layer_s: float = 0.0
    to_device: LinkCost = LinkCost()
    to_host: LinkCost = LinkCost()
    disk: LinkCost = LinkCost()
    workers: int = 1
    worker_bytes_s: float = inf
    worker_flop_s: float = inf
    gather_slows: float = 1.0
    copied_bytes_s: float = inf

    def operation_s(self, operation: Operation) -> float:
        moved = (operation.read + operation.written) / self.read_bytes_s
        return self.launch_s + max(moved, operation.flop / self.flop_s)

    def submitted_s(self, work: Submitted) -> float:
        links: dict[Lane, LinkCost] = {TO_DEVICE: self.to_device, TO_HOST: self.to_host, DISK_LANE: self.disk}
        if work.lane in links:
            return links[work.lane].seconds(work.nbytes, work.pieces)
        return max(work.nbytes / self.worker_bytes_s, work.flop / self.worker_flop_s)
