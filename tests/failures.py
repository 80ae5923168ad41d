"""Runs that fail on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from harness.jobs.runner import Runner


@contextmanager
def third_record_fails() -> Iterator[None]:
    """The third example of a run ends in an error that no other would survive, which must reach the caller."""
    really, calls = Runner.record, []

    def failing(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError("the power went")
        return really(self, *arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="the power went"):
        patch.setattr(Runner, "record", failing)
        yield
