"""Every method says the tokens that are stored for it (tests/stored_tokens.py)."""

from __future__ import annotations

from typing import Any

import pytest

from harness.results.identity import CORE_VERSION
from tests.own_methods import own_methods
from tests.stored_tokens import TokenCase, cases, defaults, run, stored

MEANT = (
    "Where that is meant, raise CORE_VERSION in harness/results/identity.py and make the stored tokens again: "
    "`python -m tests.stored_tokens`. Where it is not, the last change has a fault."
)
CHANGED = "{} changed. " + MEANT
OTHER = (
    "{0} says other tokens here than those stored.\n"
    "Is the code as it was, and this another machine? Then its CPU may round a near tie otherwise, which is the fault "
    "of the prompt and not of the CPU: run the test again under MKL_ENABLE_INSTRUCTIONS=AVX2 (heeded on Intel alone), "
    "MKL_CBWR=COMPATIBLE and ATEN_CPU_CAPABILITY=default, or all tests of equal tokens under all of them: "
    "`make test-cpus`.\n"
    "Have you changed what is computed? " + MEANT
)


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = stored()["tokens"]
    return found


@pytest.mark.tokens
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_tokens_are_those_stored(case: TokenCase, known: dict[str, dict[str, Any]]) -> None:
    assert case.name in known, f"nothing is stored for {case.name}: run python -m tests.stored_tokens"
    tokens, _ = run(case, known[case.name]["seed"])
    assert tokens == known[case.name]["tokens"], OTHER.format(case.name)


def test_all_methods_are_there_in_both_protocols_and_places(known: dict[str, dict[str, Any]]) -> None:
    assert set(known) == {case.name for case in cases()}
    seen = {(case.preset, case.protocol) for case in cases()}
    ours = [entry.name for entry in own_methods()]
    assert seen >= {(name, protocol) for name in ours for protocol in ("prompt", "context")}
    offloading = {case.preset for case in cases() if case.method.offloads}
    assert offloading <= {case.preset for case in cases() if case.placement == "host" and case.protocol == "context"}


def test_tokens_and_defaults_are_those_of_the_core_version() -> None:
    """An identity leaves out defaults: were one changed under the same version, two runs would share a folder. A new
    key changes none."""
    known, now = stored(), defaults()
    assert known["core"] <= CORE_VERSION  # it also rises where folders of runs get another form
    changed = [key for key in known["defaults"].keys() & now.keys() if known["defaults"][key] != now[key]]
    assert not changed, CHANGED.format(f"The default of {', '.join(changed)}")
