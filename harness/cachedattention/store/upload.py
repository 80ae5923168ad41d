"""An upload: keys and values of a turn on their way from the device into blocks in host memory,
layer by layer, while the model goes on (CachedAttention, section 3.2.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from time import perf_counter
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from harness.cachedattention.store.block import Block, NotSaved, by_layer
from methods.tiers.block import SplitRows, Tensors
from methods.tiers.lanes import Spans, TransferLane
from methods.tiers.rows import Place, copied_into
from methods.tiers.tier import HOST
from methods.tiers.transfer import beside_the_model, reached

Parts = Mapping[str, SplitRows]
# a layer's rows, as they are stored: the same names, shapes and dtypes
MakeStored = Callable[[int, Parts], Parts]


def as_given(number: int, rows: Any) -> Any:
    """Return a layer's rows unchanged, for rows that are stored, or handed out, as they are."""
    return rows


class ArrivingRows(Mapping[str, Tensor]):
    """The rows of one block by name, in place of a plain dictionary while they are on their way
    from the device: the block at `place` among those of an upload. Reading a row waits for its
    layer, and raises `NotSaved` where it does not come."""

    def __init__(self, layers: Mapping[str, Future[list[Tensors]]], place: int) -> None:
        self._layers, self._place = layers, place

    def __getitem__(self, name: str) -> Tensor:
        return self._layers[name].result()[self._place][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def done(self) -> bool:
        return all(layer.done() for layer in self._layers.values())


class UploadToHost:
    """Blocks of consecutive tokens whose keys and values are being copied from the device into host
    memory, layer by layer, by another thread (that of `lane`). The tensors given are kept alive
    until their layer is copied, and the caller must not change them."""

    def __init__(
        self,
        tokens: Sequence[int],
        layers: Mapping[str, Tensor | SplitRows],
        rest: Mapping[str, Tensor],
        *,
        length: int,
        place: Place,
        stored: MakeStored,
        lane: TransferLane,
    ) -> None:
        """Begin to copy `layers`, tensors [..., tokens, width] by name, in blocks of `length`
        tokens, of which the last one may be shorter; where there are none, one block without rows
        holds all tokens. `rest`, tensors that belong to all tokens, makes a last block without
        tokens. `place`: the device that the rows leave, and the host memory to which they go.
        `stored`: changes the rows of a layer into those to store, in the copying thread."""
        began = perf_counter()
        self._stored, self._place = stored, place
        self._after = reached(place.device)
        # in which rows were on their way, and in which the caller waited
        self.spans, self.waits = Spans(), Spans()
        parts = {
            name: x if isinstance(x, SplitRows) else SplitRows(x) for name, x in layers.items()
        }
        count = len(tokens)
        length = length if layers else max(1, count)
        cuts = [slice(start, min(start + length, count)) for start in range(0, count, length)]
        # which tokens go into each block; None for the rest
        self._cuts = [*cuts, *([None] if rest else [])]
        # by number, each with the bytes that wait for it
        self.layers: dict[int, tuple[Future[list[Tensors]], int]] = {}
        for number, names in sorted(by_layer([*parts, *rest]).items()):
            own = {name: parts[name] for name in names if name in parts}
            whole = {name: rest[name] for name in names if name in rest}
            size = sum(x.like.nbytes for x in own.values()) + sum(x.nbytes for x in whole.values())
            self.layers[number] = lane.submit(partial(self._layer, number, own, whole)), size
        self.blocks: list[Block] = []
        token_bytes = sum(part.like.nbytes for part in parts.values()) // max(1, count)
        for at, cut in enumerate(self._cuts):
            text = () if cut is None else tuple(tokens[cut])
            size = sum(x.nbytes for x in rest.values()) if cut is None else token_bytes * len(text)
            by_number = by_layer(rest if cut is None else parts)
            rows = ArrivingRows(
                {name: self.layers[number][0] for number, own in by_number.items() for name in own},
                at,
            )
            self.blocks.append(Block(uuid4().hex, text, size, rows))
        self.waited(began)

    @property
    def text(self) -> list[int]:
        """Return the tokens of all blocks, in order."""
        return [token for block in self.blocks for token in block.tokens]

    @property
    def finished(self) -> bool:
        return all(future.done() for future, _ in self.layers.values())

    @property
    def hidden_s(self) -> float:
        """Return the seconds in which rows were being copied and no caller waited; the number is
        complete once `finished`."""
        return self.spans.seconds_without(self.waits)

    def waited(self, since: float) -> None:
        """Note that the caller has waited for this upload, from `since` (a value of `perf_counter`)
        until now."""
        self.waits.add(since, perf_counter())

    def wait(self) -> None:
        """Wait until every layer is copied or has failed."""
        for future, _ in self.layers.values():
            future.exception()

    def release(self) -> None:
        """Drop the references to rows and blocks, once the session has them."""
        self.layers, self.blocks = {}, []

    @torch.no_grad()
    def _layer(self, number: int, rows: Parts, rest: Tensors) -> list[Tensors]:
        """Copy a layer's rows and `rest` into host memory; return one dictionary of tensors per
        block."""
        began = perf_counter()
        try:
            with beside_the_model(self._place.device, self._after):
                stored = self._stored(number, rows) if rows else {}
                return [self._copied(stored, rest, cut) for cut in self._cuts]
        except Exception as error:
            raise NotSaved(
                f"rows could not be copied from the device ({type(error).__name__}: {error})"
            ) from error
        finally:
            self.spans.add(began, perf_counter())

    def _copied(self, stored: Parts, rest: Tensors, cut: slice | None) -> Tensors:
        part = (
            rest
            if cut is None
            else {name: x.cut(cut.start, cut.stop).joined() for name, x in stored.items()}
        )
        return {name: copied_into(HOST, x, self._place) for name, x in part.items()}
