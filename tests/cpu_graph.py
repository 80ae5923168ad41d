"""Captures operations on the CPU and replays them on the same memory: the tests' stand-in for a CUDA graph.

As there, capturing runs nothing. Operations of torch say on the meta device what they would return, calls of compiled
kernels are checked and packed, and both are written down. Every number in Python, every shape and every place in
memory is that of the capture, and what asks for a value that was not computed is refused. Operations that look at the
same memory in another way leave no trace.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import cpu
from kernels.step_inputs import CaptureError
from tests.dispatched import changes, mapped, tensors

WAITING = ("item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2")
FROM_HOST = (torch.tensor, torch.as_tensor)
TO_HOST = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
COPIES = ("clone", "_to_copy")
SMALL = 1 << 12  # entries
PLACES = ("dtype", "layout", "device", "pin_memory")  # what an operation that makes a tensor takes, unless it is given


class CpuGraph(TorchDispatchMode):
    """Operations that were captured together. What one makes lies in memory that another may use again once nothing in
    Python refers to it, as when they run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self._places: dict[int, StepMemory] = {}  # by their address

    @property
    def rooms(self) -> Collection[StepMemory]:
        """The memory that operations write to, beside what they were given."""
        return self._places.values()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Write down what is called here."""
        with compiled_calls(self.take), NoValues(), self:
            yield

    def replay(self) -> None:
        """Do it."""
        for call in self.calls:
            call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name in WAITING or (name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])):
            raise CaptureError(f"{name} waits for a value of the device")
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        if _looks(func):
            return func(*args, **kwargs)
        if changes(func):
            _refuse_another_size(func, args, kwargs)
            self.calls.append(partial(func, *self._kept(args), **self._kept(kwargs)))
            return _returned(func, args, kwargs)
        out = self._made(func, args, kwargs)
        if name in EMPTY:
            return out
        if name in COPIES:
            self.calls.append(partial(torch.ops.aten.copy_.default, self._kept(out), self._kept(args[0])))
        else:
            self.calls.append(_into(func, self._kept(args), self._kept(kwargs), self._kept(out)))
        return out

    def take(self, function: Any, *structs: bytes) -> None:
        """Write down a call of a compiled kernel."""
        if function.restype is not None:
            raise CaptureError(f"{function.__name__} returns a number to the host")
        self.calls.append(partial(function, *structs))

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` will return, in memory that nobody uses. What copies a little is asked itself, which is
        quicker."""
        name = func.overloadpacket.__name__
        if str(kwargs.get("device") or "cpu") != "cpu":
            raise CaptureError(f"{name} makes a tensor on {kwargs['device']}")
        if name in EMPTY:
            return self._on_the_cpu(func(*args, **kwargs | {"device": "meta"}))
        if name in COPIES and args[0].numel() <= SMALL:
            return self._on_the_cpu(func(*args, **kwargs))
        names = {argument.name for argument in func._schema.arguments}
        elsewhere = {name: value for name, value in (("device", "meta"), ("pin_memory", False)) if name in names}
        return mapped(self._on_the_cpu, func(*mapped(_meta, args), **mapped(_meta, kwargs) | elsewhere))

    def _on_the_cpu(self, like: Tensor) -> Tensor:
        size = max(1, like.untyped_storage().nbytes())
        room = next((room for room in self.rooms if room.size == size and room.free), None)
        if room is None:
            room = StepMemory(size)
            self._places[room.storage.data_ptr()] = room
        return torch.empty(0, dtype=like.dtype).set_(room.storage, 0, like.shape, like.stride())

    def _kept(self, value: Any) -> Any:
        """The same with tensors that this graph alone holds."""
        return mapped(self._own, value)

    def _own(self, x: Tensor) -> Tensor:
        if (room := self._places.get(x.untyped_storage().data_ptr())) is None:
            return x
        room.kept += 1
        return x.detach()


@contextmanager
def compiled_calls(take: Callable[..., None]) -> Iterator[None]:
    """Hand the calls of compiled kernels that this thread makes here to `take`, as function and packed structs, in
    place of making them."""
    here = get_ident()

    def handed(function: Any, *structs: bytes) -> Any:
        return take(function, *structs) if get_ident() == here else function(*structs)

    entries = [scope["entry"] for scope in _scopes()]
    for scope, entry in zip(_scopes(), entries, strict=True):
        scope["entry"] = partial(handed, entry)
    try:
        yield
    finally:
        for scope, entry in zip(_scopes(), entries, strict=True):
            scope["entry"] = entry


@cache
def _scopes() -> list[dict[str, Any]]:
    """Return the globals of the functions that kernels/cpu/ffi/bindings.py has written for each library; none without a
    compiler. Each holds the compiled function as `entry`."""
    scopes = []
    for module in pkgutil.iter_modules(cpu.__path__, "kernels.cpu."):
        with suppress(ImportError):
            library = getattr(import_module(module.name), "_library", SimpleNamespace())
            scopes += [
                call.__globals__ for call in vars(library).values() if "entry" in getattr(call, "__globals__", {})
            ]
    return scopes


class StepMemory:
    """Memory that captured operations write to."""

    def __init__(self, size: int) -> None:
        self.storage = torch.empty(size, dtype=torch.uint8).untyped_storage()
        self.size = size  # bytes
        self.kept = 0  # tensors in it that the graph holds

    @property
    def free(self) -> bool:
        """Whether no tensor lies here but those that the graph holds."""
        return bool(torch._C._storage_Use_Count(self.storage._cdata) == 1 + self.kept)


class NoValues(TorchFunctionMode):
    """Refuses what would bring values from the host, or there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FROM_HOST:
            raise CaptureError(f"torch.{func.__name__} brings numbers from the host, which waits for them on a device")
        if func in TO_HOST:
            raise CaptureError(f"{func.__name__} waits for a value of the device")
        return func(*args, **(kwargs or {}))


def _meta(x: Tensor) -> Tensor:
    if not x.is_cpu:
        raise CaptureError(f"takes a tensor on {x.device}")
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@cache
def _looks(func: Any) -> bool:
    """Whether it returns what it was given, seen in another way."""
    told = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in told)


def _refuse_another_size(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse what gives a tensor another shape, as `out=` does with one that does not fit: it would keep the old one
    for all that follows in the capture."""
    outs = {argument.name: kwargs[argument.name] for argument in func._schema.arguments if argument.is_out}
    reshapes = torch.Tag.inplace_view in func.tags
    if outs and not reshapes:
        like = mapped(_meta, kwargs)
        func(*mapped(_meta, args), **like)
        pairs = zip(tensors([like[name] for name in outs]), tensors(outs), strict=True)
        reshapes = any(made.shape != out.shape for made, out in pairs)
    if reshapes:
        raise CaptureError(f"{func.overloadpacket.__name__} gives a tensor another shape")


def _returned(func: Any, args: Any, kwargs: Any) -> Any:
    """What `func` returns: all that it changes, or nothing."""
    changed = tuple(args[at] if at < len(args) else kwargs[name] for at, name in changes(func))
    count = len(func._schema.returns)
    if count not in (0, len(changed)):
        raise CaptureError(f"{func} changes a tensor and returns another")
    return None if not count else changed if count > 1 else changed[0]


def _into(func: Any, args: Any, kwargs: Any, out: Any) -> Callable[[], Any]:
    """What computes `func` once more and leaves the results in `out`."""
    if (found := _with_out(func)) is None:
        return partial(_copied, func, args, kwargs, out)
    with_out, names = found
    results = out if isinstance(out, tuple) else (out,)
    takes = {argument.name for argument in with_out._schema.arguments}
    given = {name: value for name, value in kwargs.items() if name in takes}
    return partial(with_out, *args, **given, **dict(zip(names, results, strict=True)))


def _copied(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    for held, result in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
        held.copy_(result)


@cache
def _with_out(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The operation that takes what `func` takes, and tensors for the results: it, and their names."""
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outs = tuple(argument.name for argument in other._schema.arguments if argument.is_out)
        if len(outs) == len(func._schema.returns) > 0 and _takes(other) == _takes(func):
            return other, outs
    return None


def _takes(func: Any) -> list[tuple[str, str]]:
    """Name and type of all that decides what an operation computes."""
    decides = [argument for argument in func._schema.arguments if not argument.is_out and argument.name not in PLACES]
    return [(argument.name, str(argument.type)) for argument in decides]
