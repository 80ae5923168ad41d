"""Paths as a user types them. Imports nothing of the harness."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path


class PathError(ValueError, ArgumentTypeError):
    """What was typed is no path; argparse shows the message as it is."""


def typed(text: str, key: str = "") -> Path:
    """With the user's home in place of ~, which a shell leaves as it is behind an equals sign. `key`: what stands
    before it on the command line, for errors."""
    if not text.strip():
        raise PathError(f"{key} is empty: name a file or a folder, or leave it out".lstrip())
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise PathError(f"{key}{text} names a home that is not there: write the path out.") from error
