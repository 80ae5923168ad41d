"""Every method says the tokens that are stored for it (tests/stored_tokens.py)."""

from __future__ import annotations

from typing import Any

import pytest

from harness.config.catalogue import entries
from harness.results.identity import CORE_VERSION
from tests.stored_tokens import TokenCase, cases, defaults, run, stored

CHANGED = (
    "{} changed. Where that is meant, raise CORE_VERSION in harness/results/identity.py and make the stored tokens "
    "again: python -m tests.stored_tokens. Where it is not, the last change has a fault."
)


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = stored()["tokens"]
    return found


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_tokens_are_those_stored(case: TokenCase, known: dict[str, dict[str, Any]]) -> None:
    assert case.name in known, f"nothing is stored for {case.name}: run python -m tests.stored_tokens"
    tokens, _ = run(case, known[case.name]["seed"])
    assert tokens == known[case.name]["tokens"], CHANGED.format(f"The outputs of {case.name}")


def test_all_methods_are_there_in_both_protocols_and_places(known: dict[str, dict[str, Any]]) -> None:
    assert set(known) == {case.name for case in cases()}
    seen = {(case.preset, case.protocol) for case in cases()}
    assert seen >= {(entry.name, protocol) for entry in entries("method") for protocol in ("prompt", "context")}
    offloading = {case.preset for case in cases() if case.method.offloads}
    assert offloading <= {case.preset for case in cases() if case.placement == "host" and case.protocol == "context"}


def test_tokens_and_defaults_are_those_of_the_core_version() -> None:
    """An identity leaves out defaults: were one changed under the same version, two runs would share a folder. A new
    key changes none."""
    known, now = stored(), defaults()
    assert known["core"] == CORE_VERSION, "CORE_VERSION was raised: make the stored tokens again"
    changed = [key for key in known["defaults"].keys() & now.keys() if known["defaults"][key] != now[key]]
    assert not changed, CHANGED.format(f"The default of {', '.join(changed)}")
