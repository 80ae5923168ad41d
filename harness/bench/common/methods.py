"""Methods by the names of their yaml files, as the command line knows them, and without hydra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from harness.config.catalogue import entries
from harness.config.plugins import build
from methods.base import Method


def names() -> list[str]:
    """Every method; its presets are left to those who name them."""
    return [entry.name for entry in entries("method") if entry.base is None]


def load(name: str, **changes: Any) -> Method:
    """`changes`: parameters in place of the yaml's."""
    known = {entry.name: entry for entry in entries("method")}
    if name not in known:
        raise ValueError(f"method={name} is unknown: choose from {', '.join(known)}.")
    method: Method = build(known[name].values() | changes, "method")
    return method


def parsed(spec: str) -> tuple[str, Method]:
    """`quest` or `quest:select_per=kv_head,page_size=32`."""
    name, _, rest = spec.partition(":")
    changes = dict(item.split("=", 1) for item in rest.split(",") if item)
    return spec, load(name, **{key: yaml.safe_load(value) for key, value in changes.items()})


def chosen(specs: Sequence[str]) -> dict[str, Method]:
    """Those named, or every method there is."""
    return dict(parsed(spec) for spec in specs or names())
