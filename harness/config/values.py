"""Which values settings may have: their types, ranges and sizes. One check for the settings of a run, the traffic of a
server and a simulation, and the error that all settings raise. Imports neither torch nor hydra."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from harness.config.catalogue import plain
from harness.config.plugins import fits, is_size, wrong_type
from harness.terminal.arguments import typed

UNITS = {"": 1, **{f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}}
UNITS |= {f"{unit}iB": 1024**power for power, unit in enumerate("KMGT", 1)}
MOST_SEED = 2**63 - 1  # that torch takes


class SettingsError(ValueError):
    """A setting has a value it cannot have; the message names it and what it may be."""


@dataclass(frozen=True)
class Range:
    """Bounds a number; null is in every range. `hint`: what the ends mean, in words."""

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
        ends = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        named = [f"{word} {end}" for word, end in ends.items() if end is not None]
        return " and ".join(named) + (f", {self.hint}" if self.hint else "")


FROM_0, FROM_1, ABOVE_0 = Range(least=0), Range(least=1), Range(above=0)
Ranges = Mapping[str, Range]


def check_values(section: Any, ranges: Ranges, prefix: str = "") -> None:
    """Raise `SettingsError` for the first field of a dataclass, or of one in it, whose value is an empty text, of the
    wrong type, no number (nan), no size that can be read, or out of its range. `ranges`: by key, as the command line
    writes it."""
    kind: type = type(section)
    for name, hint in _hints(kind).items():
        key, value = f"{prefix}{name}", getattr(section, name)
        if is_dataclass(value):
            check_values(value, ranges, f"{key}.")
            continue
        if isinstance(value, str) and not value.strip():  # a slip, as when a shell variable was not set
            raise SettingsError(f"{key} is empty: give it a value, or leave it out.")
        if not fits(value, hint):
            raise SettingsError(wrong_type(key, value, hint, repr(value) if isinstance(value, str) else None))
        number = size(key, value) if is_size(hint) and value is not None else value
        if number is not None and key in ranges and not ranges[key].holds(number):
            raise SettingsError(f"{key}={plain(value)} must be {ranges[key]}.")


def expand_paths(settings: Any, keys: Iterable[str]) -> None:
    """Put the user's home in place of ~ in these fields of a dataclass and of those in it."""
    for key in keys:
        section, _, name = key.rpartition(".")
        owner = getattr(settings, section) if section else settings
        if (given := getattr(owner, name)) is not None and given.startswith("~"):
            setattr(owner, name, str(typed(given, f"{key}=")))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def size(key: str, value: str | int) -> int:
    """Read a size in bytes: 128GB and 10TB are decimal, 128GiB is binary."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|)", str(value))
    if not found:
        raise SettingsError(f"{key}={value} is no size: write bytes, or 128GB, 10TB, 64GiB.")
    return int(float(found[1]) * UNITS[found[2]]) if found[2] or "." in found[1] else int(found[1])
