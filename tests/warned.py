"""What a test is warned of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def all_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Every warning, as often as it is given, but those of files that nobody closed: Python gives them when it collects
    garbage, which may be that of another test."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)
        yield heard
