"""A store for the keys and values of conversations between their turns, in tiers (CachedAttention,
ATC 2024, sections 3.3 and 3.4). What it keeps of one conversation is a session.

    with HistoryStore(fingerprint, host=8 * GB, disk=100 * GB, folder=Path("history")) as store:
        known = store.open("alice", tokens)  # the longest stored prefix, in blocks, layer by layer
        ...
        store.hold("alice", known.tokens, [store.leave(new_tokens, new_rows)])

Rows are tensors [..., tokens, width] by name, keys before rotation, so that a history stays valid
when its oldest tokens leave. They are kept in blocks of up to 256 tokens. What is no row of a token
goes into `rest`, tensors of any shape, which come back with all tokens of the session or not at
all. A name begins with the number of its layer: `open` hands the rows over layer by layer. What is
stored is found under its `lineage` alone, a hash of what happened to the text before the rows were
computed (fingerprint.py); EXACT where nothing did.

A store, and what it opens, belong to one thread. Threads of the store read files and write them
meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from time import perf_counter
from uuid import uuid4

import torch
from torch import Tensor

from harness.cachedattention.store.block import (
    LOST,
    Block,
    HistoryLost,
    Loss,
    has_rest,
    length,
)
from harness.cachedattention.store.disk import Disk, HistoryError, warn
from harness.cachedattention.store.fingerprint import EXACT, Fingerprint, cut_lineage
from harness.cachedattention.store.history_load import HistoryLoad, Prepare
from harness.cachedattention.store.placement import POLICIES, USUAL, Placement, Policy
from harness.cachedattention.store.statistics import Statistics
from harness.cachedattention.store.stored_sessions import StoredSessions
from harness.cachedattention.store.upload import MakeStored, UploadToHost, as_given
from methods.base import Method
from methods.tiers.block import SplitRows, Tensors
from methods.tiers.pinned_memory import PinnedPool
from methods.tiers.rows import Place, copied_into
from methods.tiers.tier import DISK, HOST
from methods.tiers.transfer import TransferEngine

Given = Mapping[str, Tensor | SplitRows]
Rest = Mapping[str, Tensor]
NOTHING: Tensors = {}


def has_rows(method: Method, codec: object, generated: int | None) -> bool:
    """Return whether a cache holds the key and value of every token as the model made them, so that
    they can be stored token by token and any prefix can be used again. Otherwise the method's whole
    state is stored. `generated`: the most generated tokens that a KV head keeps, None for all."""
    return method.rows_stay and codec is None and generated is None


class HistoryStore:
    """A store that keeps the keys and values of conversations (its sessions) between turns, in host
    memory and on disk. `host`, `disk`: bytes of each tier, 0 for none; `folder`: that of the disk
    tier. `ttl_s`: seconds since its last use after which a session is dropped. `on`: the device to
    which rows are handed out. `threads`: how many read for turns that wait; with 0 the caller does
    everything itself. `write_buffer`: bytes that may wait to be written, on top of the tiers.
    `engine`: moves all rows of the device and lends pinned memory (`expect`); by default the store
    has one of its own, which lends none. `clock`: gives seconds and never jumps."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        *,
        host: int = 0,
        disk: int = 0,
        folder: Path | None = None,
        policy: Policy = POLICIES[USUAL],
        block_tokens: int = 256,
        ttl_s: float = inf,
        on: str = "cpu",
        threads: int = 2,
        write_buffer: int = 256 * 10**6,
        engine: TransferEngine | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if bool(disk) != (folder is not None):
            raise HistoryError("a disk tier needs both: disk, its bytes, and folder, its place")
        self.fingerprint, self.block_tokens, self.threads = fingerprint, block_tokens, threads
        engine = engine or TransferEngine()
        self.placement = Placement({HOST: host, DISK: disk}, policy, ttl_s)
        self.pinned_pool = PinnedPool(engine.pinned_memory, host + write_buffer)
        self.contents = StoredSessions(
            self.placement,
            Disk(folder, disk) if folder else None,
            engine,
            threads=threads,
            place=Place(torch.device(on), region=self.pinned_pool),
            write_buffer=write_buffer,
            clock=clock,
        )
        self._closed = False
        self.contents.carry_out(self.placement.expire(clock()))

    def expect(self, size: int) -> None:
        """Prepare for `size` more bytes of keys and values: with a GPU, host memory for them is
        pinned now, up to the room of the host tier and the write buffer. No later call pins any."""
        try:
            self.pinned_pool.expect(size)
        except RuntimeError as error:
            warn(
                f"rows of conversations lie in memory that is not pinned, and travel more slowly: {error}"
            )

    def open(
        self,
        session: str,
        tokens: Sequence[int],
        read_buffer: int | None = None,
        prepare: Prepare = as_given,
        lineage: str = EXACT,
    ) -> HistoryLoad | None:
        """Begin to load the longest stored prefix of `tokens`, in whole blocks (256 tokens at
        most). Return the load, which hands out layer by layer, or None on a miss. A session with a
        rest (tensors that belong to all its tokens) is found as a whole or not at all.

        `read_buffer`: layers that come before the turn begins, None for as many as the paper's
        formula says (`MeasuredSpeeds`). `prepare`: what the thread that copies a layer does with it
        next. `lineage`: a hash that the stored rows must carry, which tells what was dropped or
        recomputed before them; EXACT if nothing was. The session counts as used, and moves into a
        faster tier, when the turn begins (`HistoryLoad.begin`)."""
        key = self._fresh(session)
        self.statistics.lookups += 1
        self.statistics.asked_tokens += len(tokens)
        parts = self.contents.covered(key, tokens, lineage)
        if not parts:
            return None
        new = len(tokens) - length(parts)
        try:
            return HistoryLoad(self.contents, key, parts, new, read_buffer, prepare)
        except HistoryLost:
            return None

    def known(self, session: str, tokens: Sequence[int], lineage: str = EXACT) -> int:
        """Return how many of `tokens`, from the first on, are stored already, so that `hold` need
        not be given them."""
        return length(self.contents.covered(self._fresh(session), tokens, lineage))

    def loss(self, session: str) -> Loss | None:
        """Return why the session (a stored conversation) is not there any more, or None where it
        is, or never was."""
        return self.contents.losses.get(self._key(session))

    def lineage(self, session: str) -> str | None:
        """Return the lineage of the session's rows, a hash of what was dropped or recomputed before
        them; None where nothing is stored."""
        return self.contents.lineages.get(self._key(session))

    def leave(
        self,
        tokens: Sequence[int],
        layers: Given,
        rest: Rest = NOTHING,
        stored: MakeStored = as_given,
    ) -> UploadToHost:
        """Begin to copy rows of `tokens` from the device into blocks in host memory, and return
        this upload for `hold`. `rest`: tensors that belong to all tokens together. A thread copies
        layer by layer, after `stored` has changed a layer's rows into those to store, so the caller
        must not change what is given meanwhile."""
        return UploadToHost(
            tokens,
            layers,
            rest,
            length=self.block_tokens,
            place=self.contents.place,
            stored=stored,
            lane=self.contents.leaving_lane,
        )

    def hold(
        self, session: str, start: int, uploads: Sequence[UploadToHost], lineage: str = EXACT
    ) -> bool:
        """Append the blocks of `uploads`, whose rows are still on their way from the device, to the
        first `start` tokens of a session, which stay untouched. What belongs to all tokens together
        is replaced. `lineage`: the hash of what was dropped or recomputed before the session's
        rows.

        Return False and store nothing if the session has another lineage by now, or if no block of
        it ends after `start` tokens; the caller then begins with the first token. The caller waits
        while more bytes are on their way than the write buffer holds."""
        began, key = perf_counter(), self._fresh(session)
        known = self.contents.until(key, start, lineage)
        if known is None:
            return False
        parts = [*known, *(block for upload in uploads for block in upload.blocks)]
        moves = self.placement.save(key, sum(block.size for block in parts), self.contents.clock())
        self.contents.hold(key, parts, lineage, moves)
        self.contents.follow(key, uploads, began)
        return True

    def truncate(self, session: str, keep: float = 0.5) -> int:
        """Drop the oldest tokens of a session so that the share `keep` stays; return how many were
        dropped. A session with a rest (tensors that belong to all tokens) loses all of them. The
        rows that stay were computed with attention to those that went, so they get a new `lineage`,
        a hash, and are found under it alone."""
        key = self._fresh(session)
        known = self.contents.blocks.get(key, [])
        count = length(known)
        drop = count - int(count * (0.0 if has_rest(known) else keep))
        if not 0 < drop < count:
            if drop:
                self.contents.carry_out(self.placement.drop(key))
            return drop
        left = drop
        while left >= len(known[0].tokens):
            left -= len(known[0].tokens)
            known = known[1:]
        try:
            kept = [self._without_first(known[0], left), *known[1:]] if left else known
        except LOST as error:
            self.contents.lose(key, error)
            return count
        text = [token for block in self.contents.blocks[key] for token in block.tokens]
        self.contents.lineages[key] = cut_lineage(self.contents.lineages[key], text, drop)
        self.contents.blocks[key] = kept
        self.placement.shrink(key, sum(block.size for block in kept))
        self.contents.settle(key)
        return drop

    def enqueue(self, session: str) -> None:
        """Note that a turn of the session waits for its start: the policy looks ahead at waiting
        turns, in the order of these calls."""
        self.placement.queue.join(self._key(session))

    def dequeue(self, session: str) -> None:
        """Note that the session's turn does not wait any more: it starts, or is given up."""
        self.placement.queue.leave(self._key(session))

    def prefetch(self) -> None:
        """Bring the sessions of the next waiting turns from disk into host memory, as far as the
        policy looks ahead."""
        for moves in self.placement.prefetch():
            self.contents.carry_out(moves, ahead=True)

    def tier(self, session: str) -> str | None:
        return self.placement.tier(self._key(session))

    @property
    def statistics(self) -> Statistics:
        return self.contents.statistics

    def flush(self) -> None:
        """Wait until everything that is on its way to disk is there, so that it outlives the
        process, however that ends."""
        self.contents.flush()

    def close(self) -> None:
        """Close the store for good. What lies in memory is written to disk first, the most recently
        used sessions as far as there is room."""
        self._closed = True
        self.contents.close()
        self.pinned_pool.close()

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _key(self, session: str) -> str:
        return f"{self.fingerprint.digest}/{session}"

    def _fresh(self, session: str) -> str:
        """Return the key of a session inside the store, after all sessions that are older than
        their time to live were dropped. Calls that look for sessions or change them begin with it.
        Raise `HistoryError` where the store is closed."""
        if self._closed:
            raise HistoryError("the store is closed: open another one on its folder")
        self.contents.collect()
        self.contents.carry_out(
            self.placement.expire(self.contents.clock()), dropped_for=Loss.TOO_OLD
        )
        return self._key(session)

    def _without_first(self, block: Block, drop: int) -> Block:
        """Return a copy of a block without its first `drop` tokens, under a new name; a block is
        never changed itself."""
        cut = {name: x[..., drop:, :] for name, x in (self.contents.read(block).rows or {}).items()}
        rows = {name: copied_into(HOST, x, self.contents.place) for name, x in cut.items()}
        return Block(uuid4().hex, block.tokens[drop:], sum(x.nbytes for x in rows.values()), rows)
