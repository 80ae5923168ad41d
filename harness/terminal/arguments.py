"""Reads what a user types after a command: paths and numbers, as types for argparse, and the options that several
commands have."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from harness.terminal.notices import complain
from methods.budget import is_budget


class PathError(ValueError, ArgumentTypeError):
    """A path on the command line is empty or cannot be resolved; argparse prints the message."""


def typed(text: str, key: str = "") -> Path:
    """Return the path that a user typed, with a leading ~ replaced by the home folder: a shell
    leaves it alone after an equals sign. `key`: the text before the path on the command line, for
    errors."""
    if not text.strip():
        raise PathError(f"{key} is empty: name a file or a folder, or leave it out".lstrip())
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise PathError(
            f"{key}{text} names a home that is not there: write the path out."
        ) from error


def config_dir(text: str) -> Path:
    """Return the folder with yaml files of the user's own that `--config-dir` names."""
    if not (folder := typed(text)).is_dir():
        raise PathError(f"{text} is not a folder: name the one that holds task/NAME.yaml")
    return folder


def _number(
    what: str, is_legal: Callable[[Any], bool], read: Callable[[str], Any] = int
) -> Callable[[str], Any]:
    """Return a function that argparse can use as `type`: it reads a number with `read` and refuses
    it unless `is_legal`. `what` describes a legal number in the error."""

    def checked(text: str) -> Any:
        with suppress(ValueError):
            if is_legal(number := read(text)):
                return number
        raise ArgumentTypeError(f"{text} should be {what}")

    return checked


count = _number("a whole number, at least 1", lambda number: number >= 1)
length = _number(
    "a whole number, at least 1, or a number of 1024 tokens, as 122K",
    lambda number: number >= 1,
    lambda text: int(text.removesuffix("K")) * (1024 if text.endswith("K") else 1),
)
natural = _number("a whole number, at least 0", lambda number: number >= 0)
positive = _number("a number above 0", lambda number: 0 < number < inf, float)
budget = _number(
    "a share above 0 and up to 1, as 0.2, or a number of tokens, as 512",
    is_budget,
    lambda text: int(text) if text.isdecimal() else float(text),
)


class Parser(ArgumentParser):
    """The argument parser of `python -m harness.COMMAND`."""

    def __init__(self, command: str, about: str | None) -> None:
        super().__init__(allow_abbrev=False, prog=f"python -m harness.{command}", description=about)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong with the arguments in one sentence, and exit."""
        complain(message)
        sys.exit(2)

    def path(self, name: str, metavar: str, about: str, **more: Any) -> None:
        """Add an argument that is a file or a folder."""
        self.add_argument(name, metavar=metavar, help=about, **{"type": typed, **more})

    def flag(self, name: str, about: str) -> None:
        self.add_argument(name, action="store_true", help=about)

    def overrides(self, about: str, nargs: str = "*") -> None:
        """Add words of the form KEY=VALUE, as `python -m harness` takes them."""
        self.add_argument("overrides", nargs=nargs, metavar="KEY=VALUE", help=about)

    def config_dirs(self, about: str = "more yaml files", **more: Any) -> None:
        """Add `--config-dir`, which may be given several times."""
        self.add_argument(
            "--config-dir",
            "-cd",
            help=about,
            **{"type": typed, **more},
            action="append",
            default=[],
        )
