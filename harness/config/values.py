"""Checks the values of settings: types, ranges, sizes in bytes, and the order of backends. Imports
neither torch nor hydra.

The same checks serve a run, a server (harness.serve) and a simulation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from harness.config.catalogue import plain
from harness.config.plugins import fits, is_size, suggestion, wrong_type
from harness.terminal.arguments import typed
from kernels import ops

UNITS = {"": 1, "B": 1, **{f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}}
UNITS |= {f"{unit}iB": 1024**power for power, unit in enumerate("KMGT", 1)}
_ORDERS = re.compile(r"\w+=\w+(,\w+)*(;\w+=\w+(,\w+)*)*")


_hints = cache(get_type_hints)


class SettingsError(ValueError):
    """Report that a setting has a value that it cannot have. The message names the setting and the
    remedy."""


@dataclass(frozen=True)
class Range:
    """Give the range of a number: `least` and `most` are inside, `above` and `below` outside.
    `hint` says in words what an end means."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    hint: str = ""

    def holds(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        ends = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        named = " and ".join(f"{word} {end}" for word, end in ends.items() if end is not None)
        return f"{named}, {self.hint}" if self.hint else named


FROM_0, FROM_1, ABOVE_0 = Range(least=0), Range(least=1), Range(above=0)


def check_values(section: Any, ranges: Mapping[str, Range], prefix: str = "") -> None:
    """Raise `SettingsError` for the first field of a dataclass, or of a dataclass in it, that is
    empty, has the wrong type, is not a number or size, or is outside its range. `ranges` has keys
    as the command line writes them, such as "store.ttl_s"; `prefix` is what stands before the names
    of `section` in such a key."""
    kind: type = type(section)
    for name, hint in _hints(kind).items():
        key, value = f"{prefix}{name}", getattr(section, name)
        if is_dataclass(value):
            check_values(value, ranges, f"{key}.")
            continue
        if (
            str in (hint, *get_args(hint))
            and int not in get_args(hint)
            and type(value) in (int, float)
        ):
            # a name of digits, which Hydra reads as a number
            setattr(section, name, value := str(value))
        # a slip, as when a shell variable was not set
        if isinstance(value, str) and not value.strip():
            raise SettingsError(f"{key} is empty: give it a value, or leave it out.")
        bare = isinstance(value, str) and float in get_args(hint) and not value.endswith("B")
        if bare or not fits(value, hint):
            raise SettingsError(wrong_type(key, value, hint))
        number = size(key, value) if is_size(hint) and isinstance(value, str) else value
        if number is not None and key in ranges and not ranges[key].holds(number):
            raise SettingsError(f"{key}={plain(value)} must be {ranges[key]}.")


def expand_paths(settings: Any, keys: Iterable[str]) -> None:
    """Replace `~` by the user's home in these fields; a key may be nested, as in "data.root"."""
    for key in keys:
        section, _, name = key.rpartition(".")
        owner = getattr(settings, section) if section else settings
        if (given := getattr(owner, name)) is not None and given.startswith("~"):
            setattr(owner, name, str(typed(given, f"{key}=")))


def size(key: str, value: str | int) -> int:
    """Return a size as a number of bytes. 128GB and 10TB are decimal, 128GiB is binary. `key` is
    the setting that errors name."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B|)", str(value))
    if not parts:
        raise SettingsError(f"{key}={value} is no size: write bytes, or 128GB, 10TB, 64GiB.")
    return int(float(parts[1]) * UNITS[parts[2]]) if parts[2] or "." in parts[1] else int(parts[1])


def backends_in_one_line(given: str | None) -> str | None:
    """Return an order of backends as a run records it, such as
    "segment_attention=flash,triton;top_k=torch": the named backends are tried first. `given` is the
    path of a yaml file such as `top_k: [torch]`, or such a line. None if the order is the usual
    one."""
    if given is None:
        return None
    try:
        asked = (
            orders(given)
            if _ORDERS.fullmatch(given)
            else yaml.safe_load(Path(given).expanduser().read_text())
        )
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(
            f"backends={given} cannot be read ({str(error).splitlines()[0]}): name a yaml file."
        ) from error
    if not fits(asked, dict) or not all(
        backends and fits(backends, list[str]) for backends in asked.values()
    ):
        raise SettingsError(
            f"backends={given} should name operations, each with a list: `top_k: [torch]`."
        )
    known = {op.name: list(op.targets) for op in ops.ALL}
    for name, backends in asked.items():
        if name not in known:
            raise SettingsError(
                f"backends: there is no operation {name!r}{suggestion(name, known)}"
            )
        if wrong := [backend for backend in backends if backend not in known[name]]:
            raise SettingsError(
                f"backends: {name} has no backend {wrong[0]!r}: choose from {', '.join(known[name])}."
            )
    changed = {
        name: backends
        for name, backends in asked.items()
        if known[name][: len(backends)] != backends
    }
    return (
        ";".join(f"{name}={','.join(backends)}" for name, backends in sorted(changed.items()))
        or None
    )


def orders(line: str | None) -> Mapping[str, list[str]]:
    """Return the backends to try first, by operation, as `ops.prefer` takes them. `line` names them
    as in "segment_attention=flash,triton;top_k=torch"; None names none."""
    parts = [part.partition("=") for part in line.split(";")] if line else []
    return {name: backends.split(",") for name, _, backends in parts}
