"""Every setting of every section has a type and, where it needs one, a range: one check for all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from math import inf, nan
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from harness.cachedattention.serving.plan import RANGES as SERVED
from harness.cachedattention.serving.plan import TrafficSettings
from harness.cachedattention.simulation.scenario import RANGES as SIMULATED
from harness.cachedattention.simulation.scenario import Scenario
from harness.config.settings import NESTED, RANGES, Settings, in_todays_words
from harness.config.values import SettingsError
from tests.fast import MODEL_ARGS, TASK_ARGS


def settings(kind: type = Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Key and type of each."""
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from settings(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint


def with_value(key: str, value: Any) -> Settings:
    section, _, name = key.rpartition(".")
    return Settings(**{section: NESTED[section](**{name: value})} if section else {name: value})


def wrong(hint: Any) -> Iterator[Any]:
    """Values of other types, and what is no number."""
    kinds = set(get_args(hint)) or {hint}
    yield from ([nan, inf] if float in kinds else [])
    yield from ([True] if kinds & {int, float} and bool not in kinds else [])
    yield from (["", "  "] if str in kinds else ["2", ""])
    yield from ([2.5] if int in kinds and float not in kinds else [])
    yield object()


@pytest.mark.parametrize(("key", "hint"), [pytest.param(*pair, id=pair[0]) for pair in settings()])
def test_a_value_of_another_type_is_refused_by_the_name_of_its_key(key: str, hint: Any) -> None:
    for value in wrong(hint):
        with pytest.raises(SettingsError, match=rf"^{key}\b"):
            with_value(key, value)


@pytest.mark.parametrize("key", RANGES)
def test_a_number_out_of_its_range_is_refused_by_the_name_of_its_key(key: str) -> None:
    assert key in dict(settings())
    outside = [end for end in (RANGES[key].above, RANGES[key].below) if end is not None]
    outside += [RANGES[key].least - 1] if RANGES[key].least is not None else []
    outside += [RANGES[key].most + 1] if RANGES[key].most is not None else []
    assert outside
    for value in outside:
        with pytest.raises(SettingsError, match=rf"^{key}={value}"):
            with_value(key, value)


@pytest.mark.parametrize(
    ("kind", "ranges"), [(TrafficSettings, SERVED), (Scenario, SIMULATED)], ids=["a server's", "a simulation's"]
)
def test_so_is_every_number_of_the_other_commands(kind: Any, ranges: dict[str, Any]) -> None:
    numbers = {name for name, hint in get_type_hints(kind).items() if {int, float} & {hint, *get_args(hint)}}
    sizes = {name for name, hint in get_type_hints(kind).items() if {int, str} <= set(get_args(hint))}
    assert numbers - sizes - ranges.keys() <= {"copies"}
    for name in numbers - sizes:
        for value in (-2, nan):
            with pytest.raises(SettingsError, match=rf"^{name}={value} "):
                kind(**{name: value})
    for name in sizes:
        with pytest.raises(SettingsError, match=rf"^{name}=many"):
            kind(**{name: "many"})


@pytest.mark.parametrize("asked", ["1500000000B", "1.5GB", "1.5 GB", "1500MB"])
def test_bytes_of_a_budget_are_the_same_however_they_are_written(asked: str) -> None:
    assert Settings(budget=asked).budget == "1500000000B"


@pytest.mark.parametrize(
    ("older", "today"),
    [
        ({"budget": None, "budget_bytes": 10**5, "align": "device_bytes"}, {"budget": "100000B"}),
        ({"budget": 0.2, "budget_bytes": None, "align": "moved_bytes"}, {"budget": 0.2, "budget_rule": "moved_bytes"}),
        ({"budget": 0.2, "budget_rule": "paper", "align": "tokens"}, {"budget": 0.2, "budget_rule": "paper"}),
    ],
)
def test_budgets_of_older_runs_in_todays_words(older: dict[str, Any], today: dict[str, Any]) -> None:
    assert in_todays_words({"budget_rule": "read"} | older) == {"budget_rule": "read"} | today


# PyPI's `kernels` beside us: our folder is ours, transformers does without the other, and nothing is uninstalled.


ROOT = Path(__file__).parents[3]
IN_RANGE = "0.18.5"  # of the versions that transformers takes, it imports the package


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder as pip leaves it."""
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("raise AssertionError('the other kernels was imported')\n")
    info = site / f"kernels-{IN_RANGE}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {IN_RANGE}\n")
    return site


def python(tmp_path: Path, *path: Path, code: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, *code], cwd=tmp_path, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("ours_first", [True, False])
def test_a_run_with_the_other_kernels_installed(tmp_path: Path, site: Path, ours_first: bool) -> None:
    path = (ROOT, site) if ours_first else (site, ROOT)
    command = ["-m", "harness", "method=streaming", "baseline=off", *MODEL_ARGS, *TASK_ARGS]
    done = python(tmp_path, *path, code=command)
    assert done.returncode == 0, done.stderr
    assert "streaming" in done.stdout


def test_one_that_is_imported_already_is_named(tmp_path: Path, site: Path) -> None:
    (site / "kernels" / "__init__.py").write_text("")
    done = python(tmp_path, site, ROOT, code=["-c", "import kernels, harness"])
    assert "import harness before" in done.stderr
