"""Sees each operation of torch that runs inside a block."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NO_LAUNCH = ("empty", "empty_like", "empty_strided", "new_empty", "from_file")  # they give memory, and do nothing to it


class DispatchRecorder(TorchDispatchMode):
    """Sees every operation of torch that runs inside. A subclass says what is kept of it."""

    def has_run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, changed: list[Tensor]
    ) -> None:
        """Note that it has run and returned `out`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        changed = changed_by(func, args, kwargs)
        out = func(*args, **kwargs)
        self.has_run(func, args, kwargs, out, changed)
        return out


def changed_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among its arguments that `func` writes to."""
    return tensors([args[at] if at < len(args) else kwargs.get(name) for at, name in changes(func)])


@cache
def changes(func: Any) -> list[tuple[int, str]]:
    """Return place and name of the arguments that `func` writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(at, x.name) for at, x in arguments if x.alias_info is not None and x.alias_info.is_write]


def is_launch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, changed: list[Tensor]) -> bool:
    """Return whether a GPU would do something for `func`: change a tensor, or make one that is no view of others."""
    if func.overloadpacket.__name__ in (*NO_LAUNCH, "detach_"):  # torch.tensor ends with that, which touches no memory
        return False
    if changed:
        return True
    given = {_storage(x) for x in tensors((args, kwargs))}
    return any(_storage(x) not in given for x in tensors(out))


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return what an operation takes or returns with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(change, part) for part in value)
    return {name: mapped(change, part) for name, part in value.items()} if isinstance(value, dict) else value


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in what an operation takes or returns; torch's own function for trees takes longer."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [x for part in parts for x in tensors(part)]


def _storage(x: Tensor) -> int:
    """The address that views share."""
    return x.untyped_storage().data_ptr()
