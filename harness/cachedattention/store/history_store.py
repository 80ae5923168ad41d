"""Keys and values of conversations that outlive their turn, in tiers (CachedAttention, ATC 2024, sections 3.3 and 3.4).

    with HistoryStore(fingerprint, host=8 * GB, disk=100 * GB, folder=Path("history")) as store:
        found = store.get("alice", tokens)  # the longest stored prefix, in blocks
        store.extend("alice", found.tokens, new_tokens, new_rows) or store.put("alice", tokens, rows)

Rows are tensors [..., tokens, width] by name, keys before rotation, so that a truncated history stays valid. What is no
row of a token goes into `rest`, tensors of any shape, which come back with all tokens of the session or not at all. A
name begins with the number of its layer: `open` hands them over layer by layer. What is stored is found under its
`lineage` alone: EXACT, or which cut its rows come after.

A store, and what it opens, belong to one thread. Threads of the store read files and write them meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from time import perf_counter
from types import TracebackType

import torch
from torch import Tensor

from harness.cachedattention.store.block import LOST, FoundHistory, HistoryLost, Loss, has_rest, length, without_first
from harness.cachedattention.store.disk import Disk, HistoryError, Wall, check_arguments, warn
from harness.cachedattention.store.fingerprint import EXACT, Fingerprint
from harness.cachedattention.store.history_load import HistoryLoad, Prepare, as_it_is
from harness.cachedattention.store.lanes import StoreLanes
from harness.cachedattention.store.placement import Placement
from harness.cachedattention.store.policies import EvictionPolicy, SchedulerAware
from harness.cachedattention.store.statistics import Statistics
from harness.cachedattention.store.stored_sessions import StoredSessions
from harness.cachedattention.store.upload import MakeStored, UploadToHost, as_given
from methods.base import Method
from methods.tiers.block import Format, SplitRows, Tensors
from methods.tiers.codec import PLAIN, Codec
from methods.tiers.pinned_memory import PinnedPool
from methods.tiers.rows import Place
from methods.tiers.tier import DISK, HOST
from methods.tiers.transfer import TransferEngine

Given = Mapping[str, Tensor | SplitRows]
Rest = Mapping[str, Tensor]
NOTHING: Tensors = {}


def has_rows(method: Method, codec: object, generated: int | None) -> bool:
    """Return whether the cache of a run with this `codec` and this limit of `generated` tokens holds all rows as the
    model made them; otherwise what the method has kept is stored whole."""
    return method.rows_stay and codec is None and generated is None


class HistoryStore:
    """A store of sessions in tiers. `capacities`: bytes by tier, as `host=10**9`. `ttl_s`: seconds since its last use
    after which a session is dropped. `wait` for another owner of the folder to end. `on`: the device of the first tier,
    and of rows that are handed out. `io_threads` read for jobs that wait; with 0 the caller does everything.
    `write_buffer`: bytes that may wait to be written, on top of the tiers. `codec`: how rows are written smaller, to be
    read back in `dtype`; the fingerprint must name it. `share`: a text may begin with what another session has stored.
    `engine`: moves all rows of the device, and lends pinned memory (`expect`); by default the store has one of its own,
    which lends none. `clock` never jumps; `wall`, which dates files, may."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        *,
        folder: Path | None = None,
        policy: EvictionPolicy | None = None,
        block_tokens: int = 256,
        ttl_s: float = inf,
        wait: bool = False,
        on: str = "cpu",
        io_threads: int = 2,
        write_buffer: int = 256 * 10**6,
        codec: Codec = PLAIN,
        dtype: torch.dtype = torch.float32,
        share: bool = False,
        engine: TransferEngine | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Wall = time.time,
        **capacities: int,
    ) -> None:
        numbers = {"block_tokens": block_tokens, "io_threads": io_threads, "write_buffer": write_buffer}
        check_arguments(capacities, folder=folder, policy=policy, ttl_s=ttl_s, **numbers)
        self.fingerprint, self.block_tokens, self.share = fingerprint, block_tokens, share
        self.format, self.engine = Format(codec, dtype), engine or TransferEngine()
        self.placement = Placement(capacities, policy or SchedulerAware(), ttl_s)
        self.pinned_pool = PinnedPool(self.engine.pinned_memory, capacities.get(HOST, 0) + write_buffer)
        files = Disk(folder, capacities[DISK], wait=wait, wall=wall) if folder else None
        self.contents = StoredSessions(
            self.placement,
            files,
            StoreLanes(self.engine, io_threads),
            place=Place(torch.device(on), region=self.pinned_pool),
            write_buffer=write_buffer,
            clock=clock,
        )
        self._blocks = partial(UploadToHost, length=block_tokens, format_=self.format, place=self.contents.place)
        self._closed = False
        if files:
            self._restore(files, wall())

    def expect(self, size: int) -> None:
        """Prepare for `size` more bytes of rows: with a GPU, host memory for them is pinned now, up to the room of the
        host tier and the write buffer. No later call pins any."""
        try:
            self.pinned_pool.expect(size)
        except RuntimeError as error:
            warn(f"rows of conversations lie in memory that is not pinned, and travel more slowly: {error}")

    def open(
        self,
        session: str,
        tokens: Sequence[int],
        read_buffer: int | None = None,
        prepare: Prepare = as_it_is,
        lineage: str = EXACT,
    ) -> HistoryLoad | None:
        """Return the longest stored prefix of `tokens`, in whole blocks, layer by layer, or None on a miss. A session
        with a rest is found as a whole or not at all. `read_buffer`: layers that come before the job begins, by default
        as many as the paper's formula says (`MeasuredSpeeds`). `prepare`: what the thread that copies a layer does with
        it next.

        The session counts as used, and moves into a faster tier, when the job begins (`HistoryLoad.begin`)."""
        key = self._fresh(session)
        self.statistics.asked(len(tokens))
        own, key = key, self.contents.longest(key, tokens) if self.share and lineage == EXACT else key
        tier, count = self.contents.found_in(key), self.contents.covered(key, tokens, lineage)
        if not (tier and count):
            return None
        parts = self.contents.blocks[key][:count]
        new, shared = len(tokens) - length(parts), key != own
        loading = HistoryLoad(self.contents, key, parts, tier, new, prepare=prepare, format_=self.format, shared=shared)
        try:
            loading.preload(read_buffer)
        except HistoryLost:
            return None
        return loading

    def get(self, session: str, tokens: Sequence[int], lineage: str = EXACT) -> FoundHistory:
        """Return what `open` finds, with copies of all rows."""
        loading = self.open(session, tokens, lineage=lineage)
        if loading is None:
            return FoundHistory()
        try:
            layers, rest = loading.all_layers()
        except HistoryLost:
            return FoundHistory()
        loading.account()
        return FoundHistory(loading.tokens, loading.tier, layers, rest)

    def known(self, session: str, tokens: Sequence[int], lineage: str = EXACT) -> int:
        """Return how many of the first `tokens` `get` would find, which `extend` may leave alone."""
        return self.contents.known(self._fresh(session), tokens, lineage)

    def loss(self, session: str) -> Loss | None:
        """Return why the session is not there any more, or None where it is, or never was."""
        return self.contents.losses.get(self._key(session))

    def lineage(self, session: str) -> str | None:
        """Return the lineage of the session's rows, or None where there are none."""
        return self.contents.lineages.get(self._key(session))

    def put(
        self,
        session: str,
        tokens: Sequence[int],
        layers: Given,
        rest: Rest = NOTHING,
        lineage: str = EXACT,
    ) -> None:
        """Store all that the session is now, in place of what was stored."""
        self.extend(session, 0, tokens, layers, rest, lineage)

    def extend(
        self, session: str, start: int, tokens: Sequence[int], layers: Given, rest: Rest = NOTHING, lineage: str = EXACT
    ) -> bool:
        """Append `tokens` after the first `start`, of which no row is touched; `rest` replaces that of before. Return
        False where these are not stored (any more): `put` the whole session then. What is given has been copied when
        this returns."""
        return self.hold(session, start, [self._blocks(tokens, layers, rest)], lineage)

    def leave(
        self, tokens: Sequence[int], layers: Given, rest: Rest = NOTHING, stored: MakeStored = as_given
    ) -> UploadToHost:
        """Return blocks for `hold`. What is given must stay as it is: a thread copies it by layer, as `stored` makes
        it."""
        return self._blocks(tokens, layers, rest, stored=stored, lane=self.contents.lanes.leaving)

    def hold(self, session: str, start: int, uploads: Sequence[UploadToHost], lineage: str = EXACT) -> bool:
        """Do as `extend` with blocks on their way; wait for what is more than the write buffer."""
        began, key = perf_counter(), self._fresh(session)
        known = self.contents.until(key, start, lineage)
        if known is None:
            return False
        parts = [*known, *(block for upload in uploads for block in upload.taken())]
        moves = self.placement.save(key, sum(block.size for block in parts), self.contents.clock())
        self.contents.hold(key, parts, lineage, moves)
        del parts
        self.contents.follow(key, uploads, began)
        return True

    def truncate(self, session: str, keep: float = 0.5) -> int:
        """Drop the oldest tokens down to a share; return how many. With a rest all of them go. Rows that stay were
        computed in sight of those that went, so they are found under their new `lineage` alone."""
        if not 0 <= keep <= 1:
            raise ValueError(f"keep={keep} should be a share, from 0 to 1")
        key = self._fresh(session)
        known = self.contents.blocks.get(key, [])
        keep = 0.0 if has_rest(known) else keep
        drop = length(known) - int(length(known) * keep)
        try:
            kept = without_first(known, drop, self.contents.read, self.format, self.contents.place)
        except LOST as error:
            self.contents.lose(key, error)
            return length(known)
        if kept:
            self.contents.cut(key, kept, drop)
        elif key in self.placement.items:
            self.contents.carry_out(self.placement.drop(key))
        return drop

    def enqueue(self, session: str) -> None:
        """Note that a job of the session waits: the policy looks ahead at the jobs in this order."""
        self.placement.queue.join(self._key(session))

    def dequeue(self, session: str) -> None:
        """Note that the session's first job starts, or is given up."""
        self.placement.queue.leave(self._key(session))

    def prefetch(self) -> None:
        """Bring the sessions of the next jobs into host memory, as far as the policy looks ahead."""
        for moves in self.placement.prefetch():
            self.contents.carry_out(moves, self.contents.lanes.ahead)

    def tier(self, session: str) -> str | None:
        return self.placement.tier(self._key(session))

    @property
    def statistics(self) -> Statistics:
        return self.contents.statistics

    def bytes_by_tier(self) -> dict[str, int]:
        return {tier.name: tier.bytes for tier in self.placement.levels}

    def flush(self) -> None:
        """Wait until all is on disk that is on its way there; then it outlives the process, however that ends."""
        self.contents.flush()

    def close(self) -> None:
        """Leave on disk what has room there, the most recently used first, and wait for it."""
        self._closed = True
        self.contents.close()
        self.pinned_pool.close()

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _key(self, session: str) -> str:
        return f"{self.fingerprint.digest}/{session}"

    def _fresh(self, session: str) -> str:
        """Return the session's key, after what is too old was dropped."""
        if self._closed:
            raise HistoryError("the store is closed: open another one on its folder")
        self.contents.collect()
        self.contents.carry_out(self.placement.expire(self.contents.clock()), dropped_for=Loss.TOO_OLD)
        return self._key(session)

    def _restore(self, disk: Disk, wall: float) -> None:
        """Take over what an earlier process left."""
        now = self.contents.clock()
        for key, entry, used_s in disk.restored(now, wall):
            self.contents.restore(key, list(entry.blocks), entry.lineage)
            moves = self.placement.save(key, sum(block.size for block in entry.blocks), used_s, fastest=DISK)
            self.contents.carry_out([move for move in moves if move.target is None])
        self.contents.carry_out(self.placement.expire(now))
