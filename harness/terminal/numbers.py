"""Checks numbers that a user types after an option, as types for argparse."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any

from methods.budget import is_budget


def _number(what: str, is_legal: Callable[[Any], bool], read: Callable[[str], Any] = float) -> Callable[[str], Any]:
    """Return a type for argparse that reads a number and checks that it is `what`."""

    def checked(text: str) -> Any:
        with suppress(ValueError):
            if is_legal(number := read(text)):
                return number
        raise ArgumentTypeError(f"{text} should be {what}")

    return checked


count = _number("a whole number, at least 1", lambda number: number >= 1, int)
length = _number(
    "a whole number, at least 1, or a number of 1024 tokens, as 122K",
    lambda number: number >= 1,
    lambda text: int(text.removesuffix("K")) * (1024 if text.endswith("K") else 1),
)
natural = _number("a whole number, at least 0", lambda number: number >= 0, int)
positive = _number("a number above 0", lambda number: 0 < number < inf)
share = _number("a share above 0 and up to 1", lambda number: 0 < number <= 1)
budget = _number(
    "a share above 0 and up to 1, as 0.2, or a number of tokens, as 512",
    is_budget,
    lambda text: int(text) if text.isdecimal() else float(text),
)
