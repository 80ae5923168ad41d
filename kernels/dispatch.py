"""Runs an operation on the first of its backends that can: the best is listed first, the
plain-torch reference last.

A backend is a module with a function of the operation's name, imported on first use. It may also
have a function `<name>_refuses`, which takes the same arguments, whose types it does not repeat,
and returns the reason why it cannot run, or None. Automatic choice takes the first backend that
does not refuse; `use_backend` insists on one and fails with that reason. A package whose kernels
may turn out not to fit on the card once they are compiled names that error in `TOO_LARGE`; the
next backend then takes over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

# name, arguments, the call itself -> its result
Around = Callable[[str, tuple[Any, ...], Callable[[], Any]], Any]

REFERENCE = "torch"
_forced: ContextVar[str | None] = ContextVar("forced_backend", default=None)
_around: ContextVar[Around | None] = ContextVar("around_operations", default=None)


class BackendError(RuntimeError):
    """Report that the requested backend cannot run an operation, and why."""


class Backend(NamedTuple):
    """Hold a backend's function for one operation, and its function that says why it refuses a
    call."""

    run: Callable[..., Any]
    # None: it serves every call; a text: it serves none, for this reason
    refuses: Callable[..., str | None] | str | None
    too_large: tuple[type[Exception], ...] = ()  # errors that are raised before anything runs


class Op:
    """Define one operation, such as `top_k`: a call runs it on the first of its backends, which are
    listed in order of preference, that does not refuse it."""

    def __init__(self, name: str, **targets: str) -> None:
        assert list(targets)[-1] == REFERENCE
        self.name = name
        self.targets = targets
        self.order = tuple(targets)  # in which they are tried
        self.used: set[str] = set()  # backends that have run since `forget_used`
        self._loaded: dict[str, Backend] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forced = _forced.get()
        for name in (forced,) if forced in self.targets else self.order:
            if (backend := self._loaded.get(name)) is None:
                if name == "cpu" and forced is None and args and getattr(args[0], "is_cuda", False):
                    continue  # it would be compiled only to refuse
                backend = self._import(name)
            run, refuses, too_large = backend
            reason = refuses(*args, **kwargs) if callable(refuses) else refuses
            if reason is not None:
                continue
            around = _around.get()
            try:
                result = (
                    run(*args, **kwargs)
                    if around is None
                    else around(self.name, args, partial(run, *args, **kwargs))
                )
            except too_large as error:
                reason = str(error).splitlines()[0]
            else:
                self.used.add(name)
                return result
        raise BackendError(f"{self.name}: {forced}: {reason}")

    def refusal(self, backend: str, *args: Any, **kwargs: Any) -> str | None:
        """Return why `backend` cannot serve this call, or None."""
        refuses = self.backend(backend).refuses
        return refuses(*args, **kwargs) if callable(refuses) else refuses

    def backend(self, name: str) -> Backend:
        """Return a backend by name, whether or not it can serve a call."""
        return self._loaded.get(name) or self._import(name)

    def _import(self, backend: str) -> Backend:
        try:
            module = import_module(self.targets[backend])
        except (ImportError, OSError) as error:
            reason = f"import failed: {error}"
            self._loaded[backend] = Backend(lambda *args, **kwargs: reason, reason)
        else:
            refuses = getattr(module, f"{self.name}_refuses", None)
            too_large = getattr(sys.modules.get(module.__package__ or ""), "TOO_LARGE", ())
            self._loaded[backend] = Backend(getattr(module, self.name), refuses, too_large)
        return self._loaded[backend]


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside this block, run every operation that has the backend `name` on it, and raise an error
    if it refuses."""
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def forced_backend() -> str | None:
    """Return the name of the backend that `use_backend` insists on, or None. Backends that run only
    on request ask for it."""
    return _forced.get()


@contextmanager
def watched(around: Around) -> Iterator[None]:
    """Inside this block, call `around(name, arguments, call)` for every operation, which must
    return `call()` and may time it: for traces and benchmarks."""
    token = _around.set(around)
    try:
        yield
    finally:
        _around.reset(token)
