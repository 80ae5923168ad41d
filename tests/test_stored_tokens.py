"""Every method says the tokens that are stored for it (tests/stored_tokens.py)."""

from __future__ import annotations

from typing import Any

import pytest

from harness.config.catalogue import entries
from tests.stored_tokens import Case, cases, run, stored

CHANGED = (
    "The outputs of {} changed. Where that is meant, make the stored tokens again: python -m tests.stored_tokens. "
    "Where it is not, the last change has a fault."
)


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, Any]]:
    return stored()


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_tokens_are_those_stored(case: Case, known: dict[str, dict[str, Any]]) -> None:
    assert case.name in known, f"nothing is stored for {case.name}: run python -m tests.stored_tokens"
    tokens, _ = run(case, known[case.name]["seed"])
    assert tokens == known[case.name]["tokens"], CHANGED.format(case.name)


def test_all_methods_are_there_in_both_protocols_and_places(known: dict[str, dict[str, Any]]) -> None:
    assert set(known) == {case.name for case in cases()}
    seen = {(case.preset, case.protocol) for case in cases()}
    assert seen >= {(entry.name, protocol) for entry in entries("method") for protocol in ("prompt", "context")}
    offloading = {case.preset for case in cases() if case.method.offloads}
    assert offloading <= {case.preset for case in cases() if case.placement == "host" and case.protocol == "context"}
