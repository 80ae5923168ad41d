"""Reads paths as a user types them, without importing anything of the harness."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path


class PathError(ValueError, ArgumentTypeError):
    """Report text that is no path; argparse shows the message as it is."""


def typed(text: str, key: str = "") -> Path:
    """Return the path with the user's home instead of ~, which a shell leaves alone after an equals
    sign. `key`: the text before it on the command line, for errors."""
    if not text.strip():
        raise PathError(f"{key} is empty: name a file or a folder, or leave it out".lstrip())
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise PathError(f"{key}{text} names a home that is not there: write the path out.") from error
