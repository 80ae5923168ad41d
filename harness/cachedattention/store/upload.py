"""Rows on their way from the device into blocks in host memory, layer by layer (CachedAttention, section 3.2.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Condition
from time import perf_counter
from uuid import uuid4
from weakref import ref

import torch
from torch import Tensor

from harness.cachedattention.store.block import Block, NotSaved, by_layer
from methods.tiers.block import Format, SplitRows, Tensors
from methods.tiers.lanes import INLINE, Spans, TransferLane
from methods.tiers.rows import Place, copied_into
from methods.tiers.tier import HOST
from methods.tiers.transfer import beside_the_model, reached

Parts = Mapping[str, SplitRows]
MakeStored = Callable[[int, Parts], Parts]  # a layer's rows, as they are stored: the same names, shapes and dtypes


def as_given(number: int, rows: Parts) -> Parts:
    """Return a layer's rows unchanged."""
    return rows


class ArrivingRows(Mapping[str, Tensor]):
    """The rows of a block, by name. Reading one waits for it, and raises `NotSaved` where it does not come."""

    def __init__(self, names: Iterable[str]) -> None:
        self._rows: dict[str, Tensor | None] = dict.fromkeys(names)
        self._changed = Condition()
        self.error: NotSaved | None = None

    def __getitem__(self, name: str) -> Tensor:
        with self._changed:
            self._changed.wait_for(lambda: self._rows[name] is not None or self.error)
            row = self._rows[name]
        if row is None:
            assert self.error is not None
            raise self.error
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def complete(self) -> bool:
        return all(row is not None for row in self._rows.values())

    def put(self, rows: Mapping[str, Tensor]) -> None:
        with self._changed:
            self._rows.update(rows)
            self._changed.notify_all()

    def fail(self, error: NotSaved) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()


def arriving(rows: Mapping[str, Tensor] | None) -> bool:
    """Return whether some rows are still on their way."""
    return isinstance(rows, ArrivingRows) and not rows.complete


def failed(rows: Mapping[str, Tensor] | None) -> bool:
    return isinstance(rows, ArrivingRows) and rows.error is not None


class UploadToHost:
    """Blocks of consecutive tokens, whose rows are on their way into them: a lane copies them, layer by layer. Tensors
    that were given are alive until their layer is copied, and must stay as they are. A block that nobody holds any more
    is not copied."""

    def __init__(
        self,
        tokens: Sequence[int],
        layers: Mapping[str, Tensor | SplitRows],
        rest: Mapping[str, Tensor],
        *,
        length: int,
        format_: Format,
        place: Place,
        stored: MakeStored = as_given,
        lane: TransferLane = INLINE,
    ) -> None:
        """Cut [..., tokens, width] into blocks of `length` tokens, of which the last one may be shorter. `rest`, which
        belongs to all of them, makes a last block without tokens; without rows there is one block of tokens before it.
        `place`: the device that the rows leave, and the host memory to which they go."""
        began = perf_counter()
        self._format, self._stored, self._place = format_, stored, place
        self._after = reached(place.device)
        self._given: dict[int, tuple[Parts, Tensors]] = {}
        self.layers: list[tuple[Future[None], int]] = []  # each with the bytes that wait for it
        self.error: NotSaved | None = None
        self.spans, self.waits = Spans(), Spans()  # in which rows were on their way, and in which the caller waited
        self.blocks: list[Block] = []
        self._rows: list[tuple[slice | None, ref[ArrivingRows]]] = []  # which tokens go where
        parts = {name: x if isinstance(x, SplitRows) else SplitRows(x) for name, x in layers.items()}
        for name, part in parts.items():
            if (shape := part.like.shape)[-2:-1] != (len(tokens),):
                raise ValueError(
                    f"{name} is {list(shape)}: it should have {len(tokens)} tokens in its last but one place"
                )
        length = length if layers else max(1, len(tokens))
        shapes, likes = {name: x.like for name, x in parts.items()}, dict[int, Tensors]()
        for start in range(0, len(tokens), length):
            size = min(length, len(tokens) - start)
            if size not in likes:
                likes[size] = format_.like({name: x[..., :size, :] for name, x in shapes.items()})
            self._add(tokens[start : start + size], likes[size], slice(start, start + size))
        if rest:
            self._add((), rest, None)
        for number, names in sorted(by_layer([*parts, *rest]).items()):
            own = {name: parts[name] for name in names if name in parts}
            whole = {name: rest[name] for name in names if name in rest}
            self._given[number] = own, whole
            size = sum(x.like.nbytes for x in own.values()) + sum(x.nbytes for x in whole.values())
            self.layers.append((lane.submit(partial(self._layer, number, size)), size))
        self.waited(began)

    def _add(self, tokens: Sequence[int], like: Mapping[str, Tensor], cut: slice | None) -> None:
        rows = ArrivingRows(like)
        self.blocks.append(Block(uuid4().hex, tuple(tokens), sum(x.nbytes for x in like.values()), rows))
        self._rows.append((cut, ref(rows)))

    @property
    def text(self) -> list[int]:
        """Return all tokens of the blocks."""
        return [token for block in self.blocks for token in block.tokens]

    def taken(self) -> list[Block]:
        """Hand over the blocks to the caller; those that nobody holds are not copied."""
        blocks, self.blocks = self.blocks, []
        return blocks

    @property
    def finished(self) -> bool:
        return all(future.done() for future, _ in self.layers)

    @property
    def hidden_s(self) -> float:
        """Return the seconds in which rows were on their way and no caller waited; complete once `finished`."""
        return self.spans.seconds_without(self.waits)

    def waited(self, since: float) -> None:
        """Note that the caller has waited, from a moment of `perf_counter` until now."""
        self.waits.add(since, perf_counter())

    def wait(self) -> None:
        """Wait for the end, good or bad."""
        for future, _ in self.layers:
            future.result()

    @torch.no_grad()
    def _layer(self, number: int, size: int) -> None:
        rows, rest = self._given.pop(number)
        began = perf_counter()
        try:
            with beside_the_model(self._place.device, self._after):
                copied = list(self._copies(number, rows, rest))
            for block, copies in copied:
                block.put(copies)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self.error = self.error or NotSaved(f"rows could not be copied from the device ({why})")
            for _, block in self._alive():
                block.fail(self.error)
        self.spans.add(began, perf_counter())

    def _copies(self, number: int, rows: Parts, rest: Tensors) -> Iterator[tuple[ArrivingRows, Tensors]]:
        alive = list(self._alive())
        stored = self._stored(number, rows) if rows and alive else {}
        for cut, block in alive:
            part = rest
            if cut is not None:
                part = self._format.encode({name: x.cut(cut.start, cut.stop).joined() for name, x in stored.items()})
            yield block, {name: copied_into(HOST, x, self._place) for name, x in part.items()}

    def _alive(self) -> Iterator[tuple[slice | None, ArrivingRows]]:
        for cut, known in self._rows:
            if (block := known()) is not None:
                yield cut, block
