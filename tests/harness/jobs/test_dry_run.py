"""What a dry run says of budget, bytes and folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.settings import Results, Settings
from harness.jobs.job import Job
from harness.jobs.memory import sealed_cost
from methods.base import Method
from methods.full import Full
from methods.h2o import H2O
from methods.tiers.tier import bytes_key
from tests.fast import MODEL, PQ, STREAMING, niah, run

Cli = Callable[..., tuple[int, str, str]]


def row(cli: Cli, name: str, *words: str) -> list[str]:
    code, out, err = cli("dry_run=true", *words)
    assert code == 0, err
    return [line.removeprefix(name).strip() for line in out.splitlines() if line.startswith(f"{name} ")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["budget=0.5", "task.lengths=[300,400]"], "150 to 200 of 300 to 400"),
        (["dense_layers=[1]"], "80 of 400"),
        (["method=full"], "all of 400"),
        (["budget_bytes=60000"], "117 of 400"),
        (["method=oracle", "budget=0.5", "budget_mass=0.9"], "at most 200 of 400"),
    ],
)
def test_the_budget_is_said_in_tokens(cli: Cli, words: list[str], says: str) -> None:
    assert says in row(cli, "budget", "method=streaming", *words)[0]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (PQ, {"placement": "host"}),
        (PQ, {"placement": "disk", "codec": "int8", "batch": 2}),
        (STREAMING, {"protocol": "context"}),
        (H2O(), {"budget": 100}),
        (Full(), {}),
    ],
    ids=["host", "disk", "context", "h2o", "full"],
)
def test_the_bytes_are_those_that_a_run_measures(tmp_path: Path, method: Method, changes: dict[str, Any]) -> None:
    done = run(tmp_path, method, niah(), **changes | {"batch": 1})
    settings = replace(Settings(results=Results(root=str(tmp_path))), **changes)
    job = Job.plan(method, niah(), MODEL, settings)
    cost = sealed_cost(job.cache_spec, MODEL.describe(), job.items)
    for tier, count in cost.held.items():
        largest = max(one[bytes_key(tier)] for one in done.records)
        assert count == pytest.approx(settings.batch * largest, rel=0.02)


def test_fulls_folder_says_whether_it_runs_too(cli: Cli) -> None:
    words = ["task.depths=1", "method=streaming"]
    [full] = row(cli, "Full", *words)
    assert full.endswith(", runs too")
    assert cli("task.depths=1", "method=full")[0] == 0
    assert row(cli, "Full", *words) == [full.replace("runs too", "finished already")]
