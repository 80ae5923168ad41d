"""Writes the yaml of a search: the start's preset with the chosen parameters, and where they come
from."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.config.catalogue import CONF, Entry
from harness.config.plugins import build, describe
from harness.config.settings import SettingsError
from harness.results.files import write_atomically
from methods.base import Method

WIDTH = 118
NAME = re.compile(r"\w[\w.-]*", re.ASCII)
DOCUMENT_END = "\n..."  # what yaml writes after a single word


def place(folder: Path, name: str) -> Path:
    """Return the file of a preset. Raises `SettingsError` if `name` is no plain word, or would lead
    to another folder."""
    if not NAME.fullmatch(name):
        raise SettingsError(
            f"--name {name!r} is no name for a preset, which method=NAME is to find: give letters, digits, - and _, "
            "and choose the folder with --out."
        )
    return folder / "method" / f"{name}.yaml"


def write(path: Path, base: Entry, method: Method, comments: Sequence[str]) -> None:
    """Write `method` as a preset based on `base`. `comments`: its headline, the command, and what
    was found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"# {line}" for line in [*comments[:2], *_wrapped(comments[2:])]]
    write_atomically(path, "\n".join([*lines, *_body(path, base, method)]) + "\n")


def refuse_other(path: Path, command: str) -> None:
    """Raise `SettingsError` if the file at `path` was not written by the same search."""
    if path.is_file() and f"# {command}" not in path.read_text(encoding="utf-8").splitlines():
        raise SettingsError(f"{path} is there already, and not from this search: give another --name or --out.")


def _wrapped(paragraphs: Sequence[str]) -> Iterator[str]:
    for text in paragraphs:
        yield from textwrap.wrap(text, WIDTH, break_on_hyphens=False, break_long_words=False)


def _body(path: Path, base: Entry, method: Method) -> Iterator[str]:
    usual = describe(build(base.values(), "method"))
    values = describe(method)
    if base.file.parent in (CONF / "method", path.parent.resolve()):
        yield f"defaults: [{base.name}]"
        values = {name: value for name, value in values.items() if value != usual[name]}
    yield from _yaml(values)


def _yaml(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        plain = list(value) if isinstance(value, tuple) else value
        text = yaml.safe_dump(plain, default_flow_style=True, width=1000)
        yield f"{name}: {text.partition(DOCUMENT_END)[0].strip()}"
