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

RELEASE = "0.5.5"  # this bridge calls its hooks; another release could be another method under the same name
INSTALL = f"pip install --no-deps kvpress=={RELEASE} 'cachetools<6' fire termcolor"


class KVPressError(ValueError):
    """Return why a press cannot run here, and what to do."""


@cache
def package() -> Any:
    """Return the module `kvpress`. Raises `KVPressError` if it is not installed, or in another
    release."""
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
            "dependencies, because it requires another release of transformers."
        ) from error


@contextmanager
def unpatched() -> Iterator[None]:
    """Undo the change that the first import of kvpress makes to all attention functions of
    transformers: it wraps each in one that hides masked keys. Here masked keys are removed instead.
    A program that has imported kvpress before wants the wrappers and keeps them."""
    wanted, before = "kvpress" in sys.modules, dict(ALL_ATTENTION_FUNCTIONS.items())
    yield
    for name, function in before.items() if not wanted else ():
        if ALL_ATTENTION_FUNCTIONS[name] is not function:
            del ALL_ATTENTION_FUNCTIONS[name]  # the wrapper registered in this process
        if ALL_ATTENTION_FUNCTIONS.get(name) is not function:
            ALL_ATTENTION_FUNCTIONS[name] = function


@contextmanager
def without_data_sets() -> Iterator[None]:
    """Provide kvpress with an empty module `datasets` if there is none: it imports it for
    statistics that it would compute from data sets of a hub, and presses that need those are
    refused here."""
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
