"""What a CUDA graph does, on a CPU: operations are captured with their tensors, and replayed on the same memory.

As there, every number in Python, every shape and every place in memory is that of the capture; what would wait for a
value of the device cannot be captured; and capturing changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from harness.machines.recorder import DispatchRecorder, place_of
from kernels.dispatch import watched
from kernels.ragged import Ragged
from methods.base.counters import CaptureError

WRITTEN = {"put_rows": slice(1), "attention_inputs_stored": slice(5, 7)}  # which arguments an operation changes
WAITING = ("item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2")


class Tape:
    """`capture` as in harness/engine/graph.py."""

    def __init__(self) -> None:
        self.captured = 0
        self.dropped = 0

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        recording = Recording()
        recording.begin()
        try:
            with watched(recording.operation), patch.object(torch, "tensor", _from_the_host):
                result = step()
        finally:
            recording.end()
        self.captured += 1
        return recording.replay, result

    def drop(self, replay: Callable[[], Any]) -> None:
        self.dropped += 1


class Recording(DispatchRecorder):
    """One step. An operation of kernels/ops.py is one entry, whatever its backend does."""

    def begin(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.inside = False  # an operation runs
        self.made: set[int] = set()  # storages that came up while capturing
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # a changed tensor and what it held
        self.__enter__()

    def end(self) -> None:
        self.__exit__(None, None, None)
        for tensor, held in self.before.values():
            tensor.copy_(held)

    def replay(self) -> None:
        for func, args, kwargs, results in self.calls:
            again = _tensors(func(*args, **kwargs))
            for old, new in zip(results, again, strict=True):
                if place_of(old) != place_of(new):
                    old.copy_(new)

    def will_run(self, func: Any, args: tuple[Any, ...], changed: list[Tensor]) -> None:
        name = func.overloadpacket.__name__
        if name in WAITING or (name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])):
            raise CaptureError(f"{name} waits for a value of the device")
        for tensor in () if self.inside else changed:
            self._keep(tensor)

    def has_run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, changed: list[Tensor]
    ) -> None:
        if self.inside:
            return
        inputs = {place_of(x) for x in _tensors((args, kwargs))}
        self.made |= {place_of(x) for x in _tensors(out)} - inputs
        self.calls.append((func, args, kwargs, _tensors(out)))

    def operation(self, name: str, arguments: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Compiled code writes where torch does not see it: to what the operations in WRITTEN are given, no other."""
        if self.inside:
            return run()
        self.inside = True
        try:
            for tensor in _tensors(arguments[WRITTEN[name]] if name in WRITTEN else ()):
                self._keep(tensor)
            result = run()
        finally:
            self.inside = False
        self.made |= {place_of(x) for x in _tensors(result)}
        self.calls.append((run, (), {}, _tensors(result)))
        return result

    def _keep(self, tensor: Tensor) -> None:
        place = place_of(tensor)
        if place not in self.made and place not in self.before:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self.before[place] = (whole, whole.clone())


def _from_the_host(*_: Any, **__: Any) -> None:
    raise CaptureError("torch.tensor brings numbers from the host, which waits for them on a device")


def _tensors(value: Any) -> list[Tensor]:
    """Those of several sequences are the one that holds them all, if there is one."""
    leaves = tree_leaves(value)
    several = [x for x in leaves if isinstance(x, Ragged)]
    held = [part for x in several for part in ([x.whole] if "whole" in vars(x) else x.parts)]
    return [x for x in leaves if isinstance(x, Tensor)] + held
