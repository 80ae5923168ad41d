"""Imports kvpress and leaves transformers as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

RELEASE = "0.5.5"  # whose hooks this bridge calls; another would be another method under the same name
INSTALL = f"pip install --no-deps kvpress=={RELEASE} 'cachetools<6' fire termcolor"


class KVPressError(ValueError):
    """Says why a press cannot run here, and what to do."""


@cache
def package() -> Any:
    """Return the module `kvpress`. Raises `KVPressError` where it is not installed, or in another release."""
    try:
        if (release := version("kvpress")) != RELEASE:
            raise KVPressError(
                f"kvpress {release} is installed, and presses run here as {RELEASE} has them: `{INSTALL}`."
            )
        with unpatched(), without_data_sets():
            return import_module("kvpress")
    except ImportError as error:
        raise KVPressError(
            f"kvpress cannot be imported ({error}): install it beside this project with `{INSTALL}`, without its "
            "dependencies, for it asks for another transformers."
        ) from error


@contextmanager
def unpatched() -> Iterator[None]:
    """Undo what the first import of kvpress does to all attention functions of transformers: it wraps each in one that
    hides keys which a press has masked. Keys do not stay masked here, they leave. Whoever has imported kvpress before
    wants the wrappers and keeps them."""
    wanted, before = "kvpress" in sys.modules, dict(ALL_ATTENTION_FUNCTIONS.items())
    yield
    for name, function in before.items() if not wanted else ():
        if ALL_ATTENTION_FUNCTIONS[name] is not function:
            del ALL_ATTENTION_FUNCTIONS[name]  # what stands before the function for this process alone
        if ALL_ATTENTION_FUNCTIONS.get(name) is not function:
            ALL_ATTENTION_FUNCTIONS[name] = function


@contextmanager
def without_data_sets() -> Iterator[None]:
    """Lend kvpress a module `datasets` where there is none: it imports that for statistics which it would make from
    data sets of a hub, and these presses are refused here."""
    if find_spec("datasets") is not None:
        yield
        return
    module = ModuleType("datasets")
    module.load_dataset = _no_data_sets  # type: ignore[attr-defined]
    sys.modules["datasets"] = module
    try:
        yield
    finally:
        del sys.modules["datasets"]


def _no_data_sets(*args: object, **kwargs: object) -> NoReturn:
    raise KVPressError("This press reads a data set from a hub, which needs `pip install datasets`: choose another.")
