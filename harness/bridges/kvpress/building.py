"""Imports kvpress without its changes to transformers, makes a press from nested mappings, as yaml and
command line give them, and refuses by name what cannot run here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from inspect import Parameter, signature
from types import ModuleType
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.config.plugins import suggestion

# this bridge calls its hooks; another release could be another method under the same name
RELEASE = "0.5.5"
INSTALL = f"pip install --no-deps kvpress=={RELEASE} 'cachetools<6' fire termcolor"
RATIO = "compression_ratio"
FROM_A_HUB = ("DuoAttentionPress", "KVzapPress", "LUKVPress", "QFilterPress")
# classes that look at stored keys and values, and at no query
BY_ROWS = ("KeyDiffPress", "KnormPress", "LagKVPress", "RandomPress", "StreamingLLMPress")
# fields whose sums count tokens
WINDOWS = ("window_size",), ("n_sink",), ("sink_size_start", "sink_size_end")
# class -> the field that names a folder with weights
OWN_WEIGHTS = {"ExpectedAttentionStatsPress": "stats_folder"}


class KVPressError(ValueError):
    """Report that a press (a class of the package kvpress that compresses a KV cache) cannot run
    here; the message says why, and what to do."""


@cache
def package() -> Any:
    """Return the module `kvpress`. Raises `KVPressError` if it is not installed, or in another
    release than RELEASE."""
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
    """Import kvpress inside this block without its change to transformers. Its first import wraps
    each attention function of transformers in one that hides masked keys; leaving the block removes
    these wrappers, since this project removes masked keys instead.

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
    """Give kvpress an empty module `datasets` to import if none is installed. It needs that package
    only for presses whose statistics come from data sets of a hub, and those are refused here."""
    if find_spec("datasets") is not None:
        yield
        return
    module = ModuleType("datasets")
    module.load_dataset = None  # type: ignore[attr-defined]
    sys.modules["datasets"] = module
    try:
        yield
    finally:
        del sys.modules["datasets"]


def build(mapping: Mapping[str, Any], key: str = "press") -> Any:
    """Return the press (an object of kvpress that compresses a KV cache) that `mapping` describes:
    `name`, a class of kvpress or the import path of one derived from `BasePress`, and its
    parameters, of which any may be a press again, or a list of presses. `key`: where the mapping
    stands in the settings, for errors."""
    press_class = _class(mapping["name"], key)
    parameters = {k: v for k, v in mapping.items() if k != "name"}
    known = dict(signature(press_class).parameters)
    known.pop(RATIO, None)
    for name in parameters:
        if name == RATIO:
            raise KVPressError(f"{key}.{RATIO} is what budget says: leave it out and set budget.")
        if name not in known:
            raise KVPressError(
                f"{key}.{name} is not a parameter of {press_class.__name__}{suggestion(name, known)}"
            )
    for name, field in known.items():
        if field.default is Parameter.empty and name not in parameters:
            wanted = "{" + f"name: {mapping['name']}, {name}: VALUE" + "}"
            raise KVPressError(
                f"{key}: {press_class.__name__} needs {name}, which has no default in kvpress: write {wanted}; a press"
                " in the place of VALUE is such a mapping again."
            )
    arguments = {name: _built(value, f"{key}.{name}") for name, value in parameters.items()}
    try:
        press = press_class(**arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise KVPressError(
            f"{key}: {press_class.__name__} refuses these parameters: {error or arguments}."
        ) from error
    _refuse(press, key)
    return press


def mappings(mapping: Any, key: str = "press") -> Iterator[Mapping[str, Any]]:
    """Yield a mapping that describes a press, and those of the presses in it. Raise `KVPressError` for
    one that has not the form that `build` takes; kvpress need not be installed."""
    if not isinstance(mapping, Mapping) or not isinstance(mapping.get("name"), str):
        raise KVPressError(
            f"{key}={mapping} names no press: give one, as in {key}={{name: SnapKVPress}}."
        )
    yield mapping
    for name, value in mapping.items():
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(inner, Mapping):
                yield from mappings(inner, f"{key}.{name}")


def set_ratio(press: Any, ratio: float) -> bool:
    """Let `press` remove the share `ratio` of the tokens. Return False for a press whose ratio
    cannot be set. In a press that applies several presses one after the other, it is set for those
    that take one."""
    if hasattr(press, "presses"):
        return any([set_ratio(member, ratio) for member in press.presses])
    try:
        setattr(press, RATIO, ratio)
    except AttributeError:
        return False
    return True


def nested(press: Any) -> Iterator[Any]:
    """Yield a press and all presses among its parameters, at any depth."""
    yield press
    for value in vars(press).values():
        for inner in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(inner, package().BasePress):
                yield from nested(inner)


def windows(press: Any) -> int:
    """Return how many tokens the recent windows and the sinks (first tokens), which are always
    kept, take in `press` and all presses in it together: a press fails on a prompt that is no
    longer."""
    return max(
        sum(getattr(each, name, 0) for name in names) for each in nested(press) for names in WINDOWS
    )


def _built(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return build(value, key)
    if isinstance(value, (list, tuple)):
        return [_built(item, key) for item in value]
    return value


def _class(name: str, key: str) -> type:
    module, _, attribute = name.rpartition(".")
    try:
        press_class = getattr(import_module(module) if module else package(), attribute)
    except ImportError as error:
        raise KVPressError(
            f"{key}.name={name} cannot be imported ({error}): is its folder on PYTHONPATH?"
        ) from error
    except AttributeError as error:
        near = suggestion(attribute, [each for each in package().__all__ if each.endswith("Press")])
        raise KVPressError(
            f"{key}.name={name}: {module or 'kvpress'} has no {attribute}{near}"
        ) from error
    base = package().BasePress
    if not isinstance(press_class, type) or not issubclass(press_class, base):
        raise KVPressError(
            f"{key}.name={name} is not a press: name a class that is derived from kvpress's BasePress."
        )
    if press_class.__call__ is not base.__call__:
        raise KVPressError(
            f"{key}.name={name} runs the model by a __call__ of its own (KVzip, Finch, presses for decoding), and here "
            "a press is asked once, when a prompt is complete: choose another."
        )
    return press_class


def _refuse(press: Any, key: str) -> None:
    name = type(press).__name__
    if isinstance(press, package().ObservedAttentionPress):
        raise KVPressError(
            f"{key}: {name} needs the weights of eager attention, which are never formed here: use h2o."
        )
    if isinstance(press, package().DMSPress):
        raise KVPressError(
            f"{key}: {name} evicts what is below a threshold, so that no budget holds: choose another."
        )
    folder = OWN_WEIGHTS.get(name)
    if name in FROM_A_HUB or (folder and getattr(press, folder) is None):
        instead = f"set {key}.{folder}" if folder else "choose another"
        raise KVPressError(f"{key}: {name} loads weights that only a hub has: {instead}.")
    members = getattr(press, "presses", [])
    if sum(set_ratio(member, 0.0) for member in members) > 1:
        raise KVPressError(
            f"{key}: budget can set the ratio of one press, and {name} has several that take one."
        )
