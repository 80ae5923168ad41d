"""Every method says the tokens that are stored for it (tests/stored_tokens.py)."""

from __future__ import annotations

from typing import Any

import pytest

from harness.results.identity import CORE_VERSION
from tests import stored_tokens
from tests.own_methods import own_methods
from tests.stored_tokens import NEW, TokenCase, cases, defaults, main, run, steady, stored, verdict

MEANT = (
    "Where that is meant, raise CORE_VERSION in harness/results/identity.py and make the stored tokens again: "
    "`python -m tests.stored_tokens`. Where it is not, the last change has a fault."
)
CHANGED = "{} changed. " + MEANT
OTHER = (
    "{0} says other tokens here than those stored.\n"
    "Is the code as it was, and this another machine? Then its CPU may round a near tie otherwise, which is the fault "
    "of the prompt and not of the CPU. `python -m tests.stored_tokens '{0}'` shakes what is computed as rounding would "
    "and says whether that is it. To compare, run the test again under MKL_ENABLE_INSTRUCTIONS=AVX2 (heeded on Intel "
    "alone), MKL_CBWR=COMPATIBLE and ATEN_CPU_CAPABILITY=default, or all tests of equal tokens under all of them: "
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


def named(name: str) -> TokenCase:
    (case,) = [case for case in cases() if case.name == name]
    return case


# a case, and the seed of its prompt
NEAR_TIE = named("sparq sinks=4 mean_value=False channel_copy=False prompt device llama"), 2


@pytest.mark.slow
def test_a_near_tie_is_not_stored() -> None:
    """It was: three disturbances of the weights left its tokens alone, and every Xeon with AMX had others."""
    assert steady(*NEAR_TIE) is None


@pytest.mark.slow
def test_rounding_is_told_from_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_tokens, "SHAKES", 4)
    here, _ = run(*NEAR_TIE)
    elsewhere = next(tokens for shake in range(1, 5) if (tokens := run(*NEAR_TIE, shake=shake)[0]) != here)
    assert verdict(*NEAR_TIE, here).endswith("has the stored tokens here.")
    assert verdict(*NEAR_TIE, elsewhere).startswith("Rounding: ")
    full = named("full prompt device llama")
    assert verdict(full, 0, [list(range(NEW))]).startswith("Not rounding: none of 4 runs")


def test_a_failure_tells_a_newcomer_what_to_run(known: dict[str, dict[str, Any]]) -> None:
    case = named("full prompt device llama")
    wrong = {case.name: known[case.name] | {"tokens": [[0] * NEW]}}
    with pytest.raises(AssertionError) as failed:
        test_tokens_are_those_stored(case, wrong)
    told = str(failed.value)
    for words in (f"`python -m tests.stored_tokens '{case.name}'`", "`make test-cpus`", "AVX2", "raise CORE_VERSION"):
        assert words in told


def test_a_case_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match="There is no case 'full'"):
        main(["full"])


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
