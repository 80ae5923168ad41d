"""Nested values with dotted keys: a configuration, a summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Flat = dict[str, Any]  # dotted key -> value


def flatten(nested: Mapping[str, Any], prefix: str = "") -> Flat:
    """{"a": {"b": 1}} -> {"a.b": 1}; lists stay as they are."""
    found: Flat = {}
    for key, value in nested.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
