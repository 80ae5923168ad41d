"""Which parameters of a test the quick suite takes: `make test` a few of them, `make test-all` every one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def mostly_slow(values: Iterable[Any], *quick: Any) -> list[ParameterSet]:
    """Parameters for `parametrize`, all but the `quick` ones marked as slow."""
    return slow_if(lambda value: value not in quick, values)


def slow_if(slow: Callable[[Any], bool], values: Iterable[Any]) -> list[ParameterSet]:
    """Parameters for `parametrize`; those for which `slow` is true are marked so."""
    return [pytest.param(value, marks=[pytest.mark.slow] if slow(value) else []) for value in values]


def every(step: int, values: Iterable[Any]) -> list[ParameterSet]:
    """Parameters for `parametrize`, each `step`-th of them quick: for many that take the same way."""
    numbered = list(values)
    quick = numbered[::step]
    return slow_if(lambda value: not any(value is one for one in quick), numbered)
