"""Builds methods, tasks and models from their configuration, and describes them.

Each is a frozen dataclass that a yaml file names by `_target_`. The dataclass is the schema: it
fills in what the yaml leaves out, and its types are checked here, before any work.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from harness.config.catalogue import CONF, entries, plain

TARGET = "_target_"
MISSING = "???"  # yaml's word for a value that the command line has to bring
LIKE = {"samples": "rounds"}  # parameters of plug-ins -> what others call the same
SEQUENCES = (list, tuple, Sequence)


class PluginError(ValueError):
    """Report that a method, task or model cannot be built from its configuration; the message says
    what to change."""


def build(config: Mapping[str, Any], kind: str) -> Any:
    """Return the plug-in that `config` describes: `_target_` names its class, all other keys are
    parameters. `kind` (method, task or model) is what errors call it."""
    values = dict(config)
    target = values.pop(TARGET, None)
    cls = _find(target, kind)
    hints = get_type_hints(cls)
    known = {field.name: hints[field.name] for field in fields(cls) if field.init}
    for name in values.keys() - known.keys():
        near = (
            f"; did you mean {kind}.{LIKE[name]}?"
            if LIKE.get(name) in known
            else suggestion(name, known)
        )
        raise PluginError(f"{kind}.{name} is not a parameter of {cls.__name__}{near}")
    for name in required(cls):
        if values.get(name, MISSING) == MISSING:
            raise PluginError(f"{kind}.{name} has no default: set it, as in {kind}.{name}=VALUE.")
    for name, value in values.items():
        if not fits(value, known[name]):
            raise PluginError(wrong_type(f"{kind}.{name}", value, known[name]))
    with naming(kind, known):
        return cls(**values)


def build_recorded(config: Any, kind: str, config_dirs: Sequence[Path] = ()) -> Any:
    """Return the plug-in that a results folder describes. Whoever wrote that folder chose the class, and importing a
    module runs it, so the class must be one that a yaml file of conf/ or of `config_dirs` names."""
    target = config.get(TARGET) if isinstance(config, Mapping) else config
    if target not in _targets(kind, (CONF, *config_dirs)):
        raise PluginError(
            f"{kind}.{TARGET}={target} is in no file of conf/{kind}, and what records alone name is not imported: if "
            f"you trust it, add --config-dir=FOLDER, where FOLDER/{kind}/NAME.yaml names it."
        )
    return build(config, kind)


@cache
def _targets(kind: str, folders: Sequence[Path]) -> list[str | None]:
    """Return the classes that yaml files of a group name; cached, because each run of a report may ask."""
    return [entry.target for entry in entries(kind, folders).values()]


@contextmanager
def naming(kind: str, parameters: Iterable[str]) -> Iterator[None]:
    """Prefix the names of parameters in errors raised inside with their `kind`: a plug-in says
    `kernel=4`, and the command line wants `method.kernel=4`."""
    try:
        yield
    except ValueError as error:
        names = "|".join(map(re.escape, parameters))
        pattern = rf"(?<![\w.])(?:{names})(?==)|^(?:{names})(?=:)"
        text = re.sub(pattern, rf"{kind}.\g<0>", str(error)) if names else str(error)
        error.args = (text, *error.args[1:])
        raise


def required(cls: Any) -> list[str]:
    """Return the names of a dataclass's fields that have no default."""
    bare = dataclasses.MISSING
    return [
        f.name for f in fields(cls) if f.init and f.default is bare and f.default_factory is bare
    ]


def describe(plugin: Any) -> dict[str, Any]:
    """Return the configuration from which `build` makes this plug-in."""
    cls = type(plugin)
    values = {field.name: getattr(plugin, field.name) for field in fields(plugin) if field.init}
    return {TARGET: f"{cls.__module__}.{cls.__qualname__}"} | values


def recorded(plugin: Any) -> dict[str, Any]:
    """Return the configuration of a plug-in that a run's folder holds: without parameters that change
    no result and that others need not see, such as a server's address."""
    hidden = {field.name for field in fields(plugin) if not field.metadata.get("recorded", True)}
    return {name: value for name, value in describe(plugin).items() if name not in hidden}


def defaults(plugin: Any) -> dict[str, Any]:
    """Return the default of each parameter of a plug-in that has one."""
    bare = set(required(plugin))
    own = [field for field in fields(plugin) if field.init and field.name not in bare]
    return {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in own
    }


def changed(plugin: Any) -> list[str]:
    """Return the parameters that are not at their defaults, as the command line writes them."""
    usual = {name: None for name in required(plugin)} | defaults(plugin)
    given = {name: value for name, value in describe(plugin).items() if name in usual}
    return [f"{name}={plain(value)}" for name, value in given.items() if value != usual[name]]


def suggestion(name: str, known: Any) -> str:
    """Return the end of an error about an unknown name: the nearest known one, or a list of all."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return (
        f"; did you mean {near[0]}?"
        if near
        else f"; there is {', '.join(sorted(known)) or 'none'}."
    )


def _find(target: Any, kind: str) -> type:
    if not isinstance(target, str) or "." not in target:
        raise PluginError(f"{kind}.{TARGET}={target} must name a class, like methods.full.Full.")
    module, _, name = target.rpartition(".")
    try:
        cls = getattr(import_module(module), name)
    except ImportError as error:
        raise PluginError(
            f"{kind}.{TARGET}={target} cannot be imported ({error}); is its folder on PYTHONPATH?"
        ) from error
    except AttributeError as error:
        raise PluginError(
            f"{kind}.{TARGET}={target}: the module {module} has no {name}."
        ) from error
    if not hasattr(cls, "__dataclass_fields__"):
        raise PluginError(
            f"{kind}.{TARGET}={target} is not a dataclass: make the plug-in a frozen dataclass."
        )
    return cls


def fits(value: Any, hint: Any) -> bool:
    """Return True if `value`, as yaml gives it, is of the annotated type `hint`; a whole number is
    accepted as a float."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, kind) for kind in inner)
    if origin is Literal:
        return value in inner
    if origin in SEQUENCES:
        return isinstance(value, (list, tuple)) and all(fits(item, inner[0]) for item in value)
    if origin is dict or hint is dict:
        return isinstance(value, Mapping)
    if hint is None or hint is type(None):
        return value is None
    if hint is float:  # nan and infinity are no numbers to a user, and none in JSON
        return fits(value, int) or (isinstance(value, float) and isfinite(value))
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def is_size(hint: Any) -> bool:
    """Return True if a setting of this type is a number of bytes that may also be written as
    "8GB"."""
    return {int, str} <= set(get_args(hint))


# examples
MAPPINGS = {
    "model.rope": "{rope_type: yarn, factor: 4}",
    "template_kwargs": "{reasoning_effort: low}",
}


def wrong_type(key: str, value: Any, hint: Any) -> str:
    """Return a sentence that says that `value` is not of the annotated type, with a hint for the
    usual slips: a percentage, a single value in place of a list, text in place of a mapping."""
    if dataclasses.is_dataclass(hint):
        return (
            f"{key} holds settings, to be named one by one, as {key}.{fields(hint)[0].name}=VALUE."
        )
    end, percent = "", re.fullmatch(r"(\d+(?:\.\d+)?) ?%", plain(value))
    # with its point, because a whole 1 is one token
    if percent and float in (hint, *get_args(hint)):
        share = float(f"{float(percent[1]) / 100:g}")
        end = f": write {share} for {percent[1]} %" if share <= 1 else ": a share is at most 1.0"
    elif key in MAPPINGS:
        end = f", as in '{key}={MAPPINGS[key]}'"
    elif get_origin(hint) is dict:
        end = f", as in '{key}={{name: {plain(value) if isinstance(value, str) else 'VALUE'}}}'"
    elif fits([value], hint):
        end = f", as in {key}=[{plain(value)}]"
    return f"{key}={plain(value)} should be {spell(hint)}{end}."


def spell(hint: Any) -> str:
    """Return a type in words, such as "a whole number" or "a list, each text"."""
    origin, inner = get_origin(hint), get_args(hint)
    if is_size(hint):
        return "a number, a size as 64MiB, or null" if float in inner else "bytes, or a size as 8GB"
    if origin in (Union, types.UnionType):
        return " or ".join(spell(kind) for kind in inner if kind is not int or float not in inner)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}" if len(inner) > 1 else str(inner[0])
    if origin is dict:
        return "a mapping"
    if origin in SEQUENCES:
        return "a list" if inner[0] is Any else f"a list, each {spell(inner[0])}"
    words = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    return words.get(hint, getattr(hint, "__name__", str(hint)))
