"""What a CUDA graph does, on a CPU: operations are captured with their tensors, and replayed on the same memory.

As there, every number in Python, every shape and every place in memory is that of the capture; what would wait for a
value of the device cannot be captured; and capturing changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.machines.recorder import DispatchRecorder, place_of, tensors_in
from methods.base.counters import CaptureError

WAITING = ("item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2")


class Tape(DispatchRecorder):
    """`capture` as in harness/engine/graph.py."""

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        self.begin()
        try:
            result = step()
        finally:
            self.end()
        return self.replay, result

    def begin(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: set[int] = set()  # storages that came up while capturing
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # a changed tensor and what it held
        self.__enter__()

    def end(self) -> None:
        self.__exit__(None, None, None)
        for tensor, held in self.before.values():
            tensor.copy_(held)

    def replay(self) -> None:
        for func, args, kwargs, results in self.calls:
            again = tensors_in(func(*args, **kwargs))
            for old, new in zip(results, again, strict=True):
                if place_of(old) != place_of(new):
                    old.copy_(new)

    def will_run(self, func: Any, args: tuple[Any, ...], changed: list[Tensor]) -> None:
        name = func.overloadpacket.__name__
        if name in WAITING or (name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])):
            raise CaptureError(f"{name} waits for a value of the device")
        for tensor in changed:
            self._keep(tensor)

    def has_run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, changed: list[Tensor]
    ) -> None:
        inputs = {place_of(x) for x in tensors_in((args, kwargs))}
        self.made |= {place_of(x) for x in tensors_in(out)} - inputs
        self.calls.append((func, args, kwargs, tensors_in(out)))

    def _keep(self, tensor: Tensor) -> None:
        place = place_of(tensor)
        if place not in self.made and place not in self.before:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self.before[place] = (whole, whole.clone())
