"""A load: the stored keys and values of a conversation come back for its next turn, layer by layer,
while the turn already computes (CachedAttention, section 3.2.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from harness.cachedattention.store.block import LOST, Block, HistoryLost, has_rest, joined, length
from harness.cachedattention.store.stored_sessions import StoredSessions
from methods.tiers.block import Tensors
from methods.tiers.lanes import Spans
from methods.tiers.transfer import beside_the_model, reached

# rows of tokens, and what belongs to all of them together, by name
LayerRows = tuple[Tensors, Tensors]
Prepare = Callable[[int, LayerRows], LayerRows]


@dataclass(frozen=True, slots=True)
class Overlap:
    """The overlap of loading stored keys and values with computing a turn. `load_s`: seconds in
    which rows were on their way, `hidden_s` of them while the turn computed or had not begun.
    `exposed_s`: seconds in which the turn waited for rows."""

    load_s: float
    hidden_s: float
    exposed_s: float


class HistoryLoad:
    """The stored keys and values of a conversation on their way to a turn: those of the first
    `tokens` tokens asked for, found in `tier`. The first layers, as many as the read buffer holds,
    are copied at once, the others after `begin`. `layer` waits for the rows of one layer.

    It hands out copies, on the device of the store, and must be used in the thread that uses the
    store."""

    def __init__(
        self,
        contents: StoredSessions,
        key: str,
        parts: Sequence[Block],
        new: int,
        read_buffer: int | None,
        prepare: Prepare,
    ) -> None:
        """Load `parts`, the first blocks of the session `key`. `new`: tokens that the turn has yet
        to compute. `read_buffer`: layers to load before the turn begins, None for as many as follow
        from the measured speeds of loading and of prefill. `prepare`: called with the number and
        the rows of each layer in the thread that copies it; what it returns is handed out. Raise
        `HistoryLost` where a file is missing or is not the one that was written."""
        self.tokens, self.tier, self.new = length(parts), contents.found_in(key) or "", new
        self.size = sum(part.size for part in parts)
        self._contents, self._key = contents, key
        # what `prepare` uses was made on the caller's stream
        self._after = reached(contents.place.device)
        self._prepare = prepare
        self._count, self._rest = len(parts), has_rest(parts)
        self._copies: dict[int, Future[LayerRows]] = {}
        self._spans = Spans()
        self._opened = perf_counter()
        self._began: float | None = None
        self._waits = Spans()  # of the job
        try:
            self.fetch = contents.fetch(key)
        except LOST as error:
            contents.lose(key, error)
            raise HistoryLost(f"the stored history is damaged: {error}") from error
        self.layers = self.fetch.layers  # their numbers
        if read_buffer is None:
            read_buffer = contents.speeds.read_buffer(self.tier, self.size, len(self.layers), new)
        self._submit(read_buffer)

    def begin(self) -> None:
        """Begin the turn that asked for this history: copy the other layers too, and count the
        session as used."""
        if self._began is None:
            self._began = perf_counter()
            self.tier = self._contents.use(self._key, self.fetch) or self.tier
            self._contents.statistics.found(self.tier, self.tokens)
            self._submit(len(self.layers))
            self._waits.add(self._began, perf_counter())

    def layer(self, number: int) -> LayerRows:
        """Wait for a layer's rows and return them; each layer can be asked for once. Where this
        raises `HistoryLost`, the caller must use nothing of this history."""
        self.begin()
        asked = perf_counter()
        try:
            layer = self._copies.pop(number).result()
            for x in layer[0].values():
                # its memory is not given away before the asking stream is done with it
                if x.is_cuda:
                    x.record_stream(torch.cuda.current_stream(x.device))
            return layer
        except LOST as error:
            self._contents.statistics.found(self.tier, self.tokens, count=-1)
            # unless the session has been given up or replaced since
            if self._contents.fetches.get(self._key) is self.fetch:
                self._contents.lose(self._key, error)
            raise HistoryLost(f"the stored history is damaged: {error}") from error
        finally:
            self._waits.add(asked, perf_counter())

    def cancel(self) -> None:
        """Stop copying layers, since the caller will ask for none any more."""
        for copy in self._copies.values():
            copy.cancel()

    @property
    def overlap(self) -> Overlap:
        loads = self.fetch.spans.since(self._opened) + self._spans
        return Overlap(loads.seconds, loads.seconds_without(self._waits), self._waits.seconds)

    def finish(self) -> Overlap:
        """End the load once the turn has computed its new tokens. Note how long that took, from
        which the size of the next read buffer follows, and return how far loading and computing
        overlapped."""
        if self._began is not None:
            computing_s = perf_counter() - self._began - self._waits.seconds
            self._contents.speeds.prefilled(self.new, computing_s)
        return self.account()

    def account(self) -> Overlap:
        """Add the seconds of this load to the store's statistics, once all rows have been asked
        for; return them."""
        self.cancel()
        overlap, statistics = self.overlap, self._contents.statistics
        self._contents.speeds.loaded(self.tier, self.size, overlap.load_s)
        statistics.load_s += overlap.load_s
        statistics.hidden_s += overlap.hidden_s
        statistics.exposed_s += overlap.exposed_s
        return overlap

    def _submit(self, layers: int) -> None:
        """Start to copy the first `layers` layers to the device, apart from those that were started
        before."""
        for number in self.layers[:layers]:
            if number not in self._copies:
                copy, rows = partial(self._copy, number), self.fetch.rows[number]
                self._copies[number] = self._contents.copying.submit(copy, after=[rows])

    def _copy(self, number: int) -> LayerRows:
        parts = self.fetch.rows[number].result()[: self._count]
        began = perf_counter()
        rest = {name: x.clone() for name, x in parts.pop().items()} if self._rest else {}
        device = self._contents.place.device
        with beside_the_model(device, self._after):
            rows = joined(
                [
                    {name: x.to(device, non_blocking=True) for name, x in part.items()}
                    for part in parts
                ]
            )
            layer = self._prepare(number, (rows, rest))
        self._spans.add(began, perf_counter())
        return layer
