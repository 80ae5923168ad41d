"""No word is ignored in silence by the other commands: each changes something, is refused, or is said to be idle."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from harness.cachedattention.serving.plan import OWN, READ, ServingPlan, points
from harness.cachedattention.simulation.costs import load as load_costs
from harness.cachedattention.simulation.outcome import simulated
from harness.cachedattention.simulation.scenario import Scenario
from harness.commands import tune
from harness.config.settings import SettingsError
from tests.fast import MODEL_ARGS, TASK_ARGS
from tests.harness.test_every_setting import OTHERS, Changes, Other, keys
from tests.talks import configured


def tuned(*words: str) -> list[str]:
    small_search = ["method=streaming", *MODEL_ARGS, *TASK_ARGS, "method.sinks=1,4", "dry_run=true"]
    return [*small_search, *words]


def test_tune_says_what_the_method_has_no_use_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Of shorthands too, which it spells out for itself."""
    assert tune.main(tuned("comm=0.125", "windows.recent_ratio=0.4")) == 0
    err = capsys.readouterr().err
    assert "note: comm changes nothing for Streaming, whose scoring moves nothing.\n" in err
    assert "note: windows.recent_ratio changes nothing for Streaming, which has no such windows.\n" in err


TIGHT = {"host": "2GB", "disk": "20GB", "sessions": 40, "warmup": 0, "rate": 2.0, "write_buffer": "1GB"}
SIMULATED: dict[str, Other] = {
    "model": Other("llama-65b"),
    "policy": Other("lru"),
    "device": Other("1GB"),
    "host": Other("4GB"),
    "disk": Other("6GB"),
    "write_buffer": Other("10MB"),
    "copies": Other(False, {"disk": "6GB"}),
    "ttl_s": Other(20),
    "positions": Other("coupled"),
    "truncation_ratio": Other(0.9),
    "preload": Other("off"),
    "sessions": Other(41),
    "rate": Other(3.0),
    "think_s": Other(3),
    "question_share": Other(0.6),
    "correlation": Other(0.1),
    "warmup": Other(20),
    "seed": Other(5),
}


def test_every_key_of_simulate_changes_something() -> None:
    assert SIMULATED.keys() == asdict(Scenario()).keys()
    costs = load_costs()

    def figures(changes: Changes) -> Any:
        try:
            row = simulated(Scenario(**TIGHT | changes), costs)
        except ValueError as error:
            return str(error)
        return {name: value for name, value in row.items() if name != "settings"}

    same = [key for key, (value, beside) in SIMULATED.items() if figures({**beside, key: value}) == figures(beside)]
    assert not same


SERVED: dict[str, Other] = {
    "rate": Other(2.0),
    "think_s": Other(9.0),
    "slots": Other(2),
    "clock": Other("busy"),
}


@pytest.mark.parametrize("key", SERVED)
def test_every_key_of_serve_makes_another_run(key: str, tmp_path: Path) -> None:
    assert list(SERVED) == list(OWN)
    folder = configured(tmp_path)

    def identity(changes: Changes) -> Any:
        words = [f"{name}={value}" for name, value in changes.items()]
        try:
            [point] = points(["task=talks", "method=full", *MODEL_ARGS, *words])
            return ServingPlan.of(point, [folder]).identity
        except ValueError as error:
            return str(error)
        except OSError as error:
            return str(error)

    value, beside = SERVED[key]
    assert identity({**beside, key: value}) != identity(beside)


def test_serve_refuses_the_settings_that_it_does_not_read() -> None:
    for key in keys():
        if key.partition(".")[0] not in READ and key not in OWN:
            with pytest.raises(SettingsError, match=key):
                points([f"{key}={OTHERS[key].value}"])


def test_serve_tells_the_template_and_cuts_what_is_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = configured(tmp_path)

    def plan(word: str) -> ServingPlan:
        [point] = points(["task=talks", "method=full", *MODEL_ARGS, word])
        return ServingPlan.of(point, [folder])

    assert plan("too_long=middle").job.settings.too_long == "refuse"
    assert "too_long=middle changes nothing here: every example fits" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"template_kwargs\.mood would change nothing"):
        plan("template_kwargs={mood: good, tone: low}")
