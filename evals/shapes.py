"""Checks the form of values of a JSON file, and describes in a sentence what does not fit."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

Shape = Any  # says what a JSON value should be, as `misfit` explains
ANY: Shape = {}  # an object with any fields

_HALF = re.compile("[\ud800-\udfff]")  # half of a surrogate pair, which JSON can spell and no tokenizer takes


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and (value.isascii() or not _HALF.search(value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_time(value: Any) -> bool:
    """Return whether a text is a time in ISO 8601, as JSON has it."""
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


KINDS: Mapping[str, Callable[[Any], bool]] = {
    "text": _is_text,
    "text that is not blank": lambda value: _is_text(value) and bool(value.strip()),
    "a list of texts": lambda value: misfit(value, ["text", ...]) is None,
    "a list of texts, not all blank": lambda value: misfit(value, ["text", ...]) is None and any(map(str.strip, value)),
    "a number": _is_number,
    "a number from 0 on": lambda value: _is_number(value) and value >= 0,
    "a number above 0": lambda value: _is_number(value) and value > 0,
    "a list of numbers": lambda value: misfit(value, ["a number", ...]) is None,
    "a whole number": lambda value: type(value) is int,
    "a whole number above 0": lambda value: type(value) is int and value > 0,
    "true": lambda value: value is True,
    "false": lambda value: value is False,
    "an object": lambda value: isinstance(value, dict),
    "a time with its zone": _is_time,
}
_ABSENT = object()


def misfit(value: Any, shape: Shape, field: str = "") -> str | None:
    """Return what is wrong with a JSON value, in words that follow the name of its place, or return
    None if it fits `shape`.

    A shape is one of KINDS, or several ("text or a whole number"), or looks like the value.
    `{name: shape}` is an object; a name that ends in "?" may be missing or null, and `str` stands for every
    name. `[shape]` is a list, `[shape, ...]` a list that is not empty, `[]` a list of anything, and
    `(shape, shape)` a list of exactly that length. Fields that a shape does not name may hold
    anything.

    >>> misfit({"turns": ["Hi", 5]}, {"turns": ["text", ...], "id?": "text or a whole number"})
    "has 5 as 'turns[1]', which should be text"
    >>> misfit({}, {"turns": ["text", ...]})
    "lacks 'turns'"
    """
    if value is _ABSENT:
        return f"lacks {field!r}"
    kind, fits = _kind(value, shape)
    if not fits:
        held = json.dumps(value, default=str)[:40]
        return f"has {held} as {field!r}, which should be {kind}" if field else f"is {held}, which should be {kind}"
    parts = () if isinstance(shape, str) else _parts(value, shape, field)
    return next(filter(None, (misfit(*part) for part in parts)), None)


def _kind(value: Any, shape: Shape) -> tuple[str, bool]:
    """Name what the value itself should be, leaving its parts aside, and say whether it is that."""
    if isinstance(shape, str):
        return shape, any(KINDS[kind](value) for kind in shape.split(" or "))
    if isinstance(shape, dict):
        return "an object", isinstance(value, dict)
    if isinstance(shape, tuple):
        return f"a list of {len(shape)}", isinstance(value, list) and len(value) == len(shape)
    least = len(shape) > 1
    return "a list that is not empty" if least else "a list", isinstance(value, list) and len(value) >= least


def _parts(value: Any, shape: Shape, field: str) -> Iterator[tuple[Any, Shape, str]]:
    """Yield each part of a value with its shape and its name."""
    if isinstance(shape, dict):
        prefix = f"{field}." if field else ""
        for name, inner in shape.items():
            if name is str:
                yield from ((part, inner, f"{prefix}{key}") for key, part in value.items())
            elif not name.endswith("?"):
                yield value.get(name, _ABSENT), inner, f"{prefix}{name}"
            elif value.get(name[:-1]) is not None:
                yield value[name[:-1]], inner, f"{prefix}{name[:-1]}"
    elif shape:
        shapes = shape if isinstance(shape, tuple) else [shape[0]] * len(value)
        yield from ((*pair, f"{field}[{i}]") for i, pair in enumerate(zip(value, shapes, strict=True)))
