"""Records the schedule of a decode step: operations, transfers and layer borders, in order and without a clock.

Nothing that is recorded depends on how long something took, so two recordings of one step are equal on a busy machine
too. An operation of kernels/ops.py is one event, whatever its backend does inside. Beside these each operation of torch
that makes or changes a tensor is one, since it would be a launch on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from harness.machines.operations import work
from harness.machines.schedule import (
    DISK_LANE,
    TO_DEVICE,
    TO_HOST,
    Lane,
    LayerBorder,
    Operation,
    ScheduleEvent,
    Submitted,
    Waited,
)
from kernels.dispatch import watched
from methods.base import AttnInput, KVLayer
from methods.tiers.traffic import Traffic
from methods.tiers.transfer.engine import Arrival

T = TypeVar("T")

NO_LAUNCH = ("empty", "empty_like", "empty_strided", "new_empty", "from_file")  # they give memory, and do nothing to it
CHOOSING = ("gather", "index", "index_select", "embedding")  # they read as much of a tensor as they return
SCATTERING = ("index_put_", "index_copy_", "scatter_", "_index_put_impl_")  # they change as much as they are given
OVERWRITING = ("copy_", "fill_", "zero_")  # they do not read what they change


class DispatchRecorder(TorchDispatchMode):
    """Sees every operation of torch that runs inside. A subclass says what is kept of it."""

    def has_run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, changed: list[Tensor]
    ) -> None:
        """It has run and returned `out`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        by_name = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        written = [
            by_name.get(argument.name)
            for argument in arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        changed = tensors_in(written)
        out = func(*args, **kwargs)
        self.has_run(func, args, kwargs, out, changed)
        return out


class StepRecorder(DispatchRecorder):
    """Notes what runs inside as the events of a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[ScheduleEvent] = []
        self._within = 0  # operations of kernels/ops.py and moves that are under way
        self._pieces = 0  # of memory that the move under way has collected
        self._keys = 0

    def has_run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, changed: list[Tensor]
    ) -> None:
        if self._within or not is_launch(func, args, kwargs, out, changed):
            return
        name = func.overloadpacket.__name__
        counted = flop_registry.get(func.overloadpacket)
        done = 0 if counted is None else int(counted(*args, **kwargs, out_val=out))
        self.events.append(Operation(name, *_touched(name, tensors_in((args, kwargs)), tensors_in(out), changed), done))

    def operation(self, name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Around an operation of kernels/ops.py."""
        within, self._within = self._within, self._within + 1
        if within and name in ("gather_rows", "gather_tiers"):
            self._pieces += arguments[1].numel()
        try:
            result = call()
        finally:
            self._within = within
        if not within:
            self.events.append(Operation(name, *work(name, arguments, result)))
        return result

    def begin(
        self,
        begin: Callable[..., Arrival[T]],
        read: Callable[[Traffic], T],
        into: Traffic,
        on: torch.device,
        *,
        ahead: bool,
    ) -> Arrival[T]:
        """Around a request for rows: they are submitted when the engine moves them, and waited for when a layer waits
        for the first time."""
        keys: list[int] = []
        arrival = begin(lambda traffic: self._moved(read, traffic, keys), into, on, ahead=ahead)
        plain = arrival.wait

        def wait() -> T:
            rows = plain()
            if keys:
                self.events.append(Waited(keys[-1]))
                keys.clear()
            return rows

        vars(arrival)["wait"] = wait
        return arrival

    def send(self, send: Callable[..., None], write: Callable[[Traffic], None], into: Traffic) -> None:
        """Around rows that are put away, which nobody waits for."""
        send(lambda traffic: self._moved(write, traffic, []), into)

    def _moved(self, move: Callable[[Traffic], T], traffic: Traffic, keys: list[int]) -> T:
        """What the host does for a move belongs to it, and so is no operation of the device."""
        within, self._within, self._pieces = self._within, self._within + 1, 0
        try:
            moved = move(traffic)
        finally:
            self._within = within
        pieces = max(1, self._pieces)
        if traffic.from_disk_bytes:
            self._submit(keys, DISK_LANE, "read", traffic.from_disk_bytes, pieces)
            pieces = 1  # they have been gathered by then
        if traffic.to_device_bytes:
            self._submit(keys, TO_DEVICE, "to device", traffic.to_device_bytes, pieces)
        if traffic.to_host_bytes:
            self._submit(keys, TO_HOST, "to host", traffic.to_host_bytes, pieces)
        return moved

    def _submit(self, keys: list[int], lane: Lane, name: str, nbytes: int, pieces: int) -> None:
        """Behind what `keys` holds of the same move."""
        self._keys += 1
        self.events.append(Submitted(self._keys, lane, name, nbytes, pieces, tuple(keys[-1:])))
        keys.append(self._keys)

    def border(self, layer: int) -> None:
        self.events.append(LayerBorder(layer))


@contextmanager
def recorded(layers: Sequence[KVLayer]) -> Iterator[list[ScheduleEvent]]:
    """Record what runs inside into the list that is returned, with a border where one of `layers` decodes. The steps
    must run the layers' own `decode`. Raises `ValueError` where threads move rows, whose order is another each time."""
    recorder = StepRecorder()
    engines = {id(layer.cache.engine): layer.cache.engine for layer in layers}.values()
    if any(layer.cache.ahead and layer.cache.engine.beside for layer in layers):
        raise ValueError("Threads of their own move the rows: record with overlap=off, or with links.")

    def decode(layer: KVLayer, plain: Callable[[AttnInput], Tensor], x: AttnInput) -> Tensor:
        recorder.border(layer.spec.index)
        return plain(x)

    with ExitStack() as undo:
        for layer in layers:
            vars(layer)["decode"] = partial(decode, layer, layer.decode)
            undo.callback(_forget, layer, "decode")
        for engine in engines:
            vars(engine).update(begin=partial(recorder.begin, engine.begin), send=partial(recorder.send, engine.send))
            undo.callback(_forget, engine, "begin", "send")
        undo.enter_context(watched(recorder.operation))
        undo.enter_context(recorder)
        yield recorder.events


def _forget(owner: object, *names: str) -> None:
    for name in names:
        del vars(owner)[name]


def tensors_in(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def place_of(x: Tensor) -> int:
    """The address of the storage, which views share."""
    return x.untyped_storage().data_ptr()


def is_launch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, changed: list[Tensor]) -> bool:
    """Whether a GPU would do something for `func`: it has changed a tensor, or made one that is no view of others."""
    return func.overloadpacket.__name__ not in NO_LAUNCH and (bool(changed) or _makes(args, kwargs, out))


def _makes(args: Any, kwargs: Any, out: Any) -> bool:
    """Whether a result is no view of what was given."""
    given = {place_of(x) for x in tensors_in((args, kwargs))}
    return any(place_of(x) not in given for x in tensors_in(out))


def _size(x: Tensor) -> int:
    """Bytes that a tensor spans: those that were expanded lie there once."""
    return min(x.nbytes, x.untyped_storage().nbytes())


def _touched(name: str, given: list[Tensor], made: list[Tensor], changed: list[Tensor]) -> tuple[int, int]:
    """Bytes that an operation of torch reads and writes."""
    if name in SCATTERING:
        moved = sum(map(_size, given[1:]))
        return moved, _size(given[-1])
    written = sum(map(_size, changed or made))
    if name in CHOOSING:
        return written + sum(map(_size, given[1:])), written
    overwritten = {id(x) for x in changed} if name in OVERWRITING else set()
    return sum(_size(x) for x in given if id(x) not in overwritten), written
