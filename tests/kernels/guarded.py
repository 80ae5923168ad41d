"""Puts guard rows around every tensor of an operation, so that a read or a write outside of one fails on any machine.

Guards hold NaN, or whole numbers that name no row: what is read there spoils the result, and what is written there is
found afterwards. Triton's interpreter runs on the CPU, so its kernels are held to more: each address that they read or
write must lie inside a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels.ragged import Ragged

GUARD = 8192  # entries on either side: more than a kernel reads at once
NO_ROW = 1 << 24  # what guards of whole numbers hold, where their type is wide enough


def guard_value(dtype: torch.dtype) -> float:
    """Return what guards, and memory that nobody has written, hold."""
    if dtype.is_floating_point:
        return float("nan")
    return float(dtype != torch.bool and min(NO_ROW, torch.iinfo(dtype).max))


def room(count: int, dtype: torch.dtype, device: Any = None) -> Tensor:
    """Return [count] entries that nobody has written, between guards: the whole storage is 2 * GUARD entries larger."""
    around = torch.full((count + 2 * GUARD,), guard_value(dtype), dtype=dtype, device=device)
    return around[GUARD : GUARD + count]


def copied(x: Tensor, dtype: torch.dtype, device: Any) -> Tensor:
    """Return x [count], in another dtype and place, between guards."""
    return room(len(x), dtype, device).copy_(x)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return all tensors among arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Ragged):
        yield from value.parts
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


class Guards(TorchFunctionMode):
    """Lets torch's own functions allocate between guards as well while an operation runs, and says afterwards whether
    all guards are whole, also those of the arguments."""

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        self._kept: dict[int, Tensor] = {}  # whole storages, by their address
        for x in tensors_in(arguments):
            self._keep(x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in ("empty", "new_empty", "empty_like") or not made.numel():
            return made
        with torch._C.DisableTorchFunction():
            held = room(made.numel(), made.dtype, made.device).as_strided(made.shape, made.stride(), GUARD)
        self._keep(held)
        return held

    def _keep(self, x: Tensor) -> None:
        if (storage := x.untyped_storage()).nbytes():
            self._kept[storage.data_ptr()] = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage)

    def assert_whole(self) -> None:
        """Raise `AssertionError` where something was written to a guard."""
        for whole in self._kept.values():
            for guard in (whole[:GUARD], whole[-GUARD:]):
                value = guard_value(whole.dtype)
                same = guard.isnan() if whole.dtype.is_floating_point else guard == value
                assert bool(same.all()), (
                    f"{int((~same).sum())} entries outside of a tensor of {whole.dtype} are written"
                )

    def spans(self) -> list[range]:
        """Return the addresses that lie between the guards."""
        return [
            range(at + GUARD * x.element_size(), at + x.nbytes - GUARD * x.element_size())
            for at, x in self._kept.items()
        ]

    def holds(self, x: Tensor) -> bool:
        """Say whether x lies between guards."""
        return x.untyped_storage().data_ptr() in self._kept


@contextmanager
def addresses_checked(guards: Guards) -> Iterator[None]:
    """Hold kernels that Triton interprets to the memory between guards, and to that of their other tensors."""
    from triton.runtime import interpreter

    builder, launch = interpreter.interpreter_builder, interpreter.GridExecutor.__call__
    running: list[tuple[str, Sequence[range]]] = []

    def launched(executor: Any, *args: Any, **options: Any) -> None:
        with torch._C.DisableTorchFunction():
            others = [x.untyped_storage() for x in tensors_in(args) if not guards.holds(x)]
            spans = [*guards.spans(), *(range(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in others)]
            running.append((executor.fn.__name__, spans))
            launch(executor, *args, **options)
            running.pop()

    def check(pointers: Any, mask: Any, does: str) -> None:
        at = pointers.data[mask.data.astype(bool)] if mask is not None else pointers.data.ravel()
        (name, spans), size = running[-1], pointers.get_element_ty().primitive_bitwidth // 8
        for span in spans:  # one load may reach several tensors
            if not at.size:
                return
            at = at[(at < span.start) | (at > span.stop - size)]
        assert not at.size, f"{name} {does} outside of its tensors, {int(at.min()):#x} to {int(at.max()):#x}"

    plain_load, plain_store, plain_add = (
        builder.create_masked_load,
        builder.create_masked_store,
        builder.create_atomic_rmw,
    )

    def load(pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "reads")
        return plain_load(pointers, mask, *rest)

    def store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "writes")
        return plain_store(pointers, value, mask, *rest)

    def add(kind: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "writes")
        return plain_add(kind, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        for name, checked in (("load", load), ("store", store)):
            patch.setattr(builder, f"create_masked_{name}", checked)
        patch.setattr(builder, "create_atomic_rmw", add)
        yield


@contextmanager
def guarded(arguments: Any, backend: str) -> Iterator[None]:
    """Run an operation on `arguments` that lie between guards. Raises `AssertionError` where it writes outside of a
    tensor, and where a kernel that Triton interprets reads there; any other read shows in the result alone."""
    guards = Guards(arguments)
    if backend == "triton" and not torch.cuda.is_available():
        with addresses_checked(guards), guards:
            yield
    else:
        with guards:
            yield
    guards.assert_whole()
