"""What a dry run says of budget, bytes and time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.settings import Results, Settings
from harness.jobs.job import Job
from harness.jobs.planning.capacity import sealed
from harness.jobs.planning.speed import Speed, measured
from harness.results.run_folder import StoredRun
from methods.base import Method
from methods.full import Full
from methods.h2o import H2O
from tests.fake_records import record
from tests.fast import MODEL, PQ, STREAMING, niah, run

Cli = Callable[..., tuple[int, str, str]]
MACHINE = {"provenance": {"machine": {"device_name": "a CPU", "cpus_usable": 2}}}


def row(cli: Cli, name: str, *words: str) -> list[str]:
    code, out, err = cli("dry_run=true", *words)
    assert code == 0, err
    return [line.removeprefix(name).strip() for line in out.splitlines() if line.startswith(f"{name} ")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["budget=0.2"], "a step reads 80 of 400 prompt tokens"),
        (["budget=100"], "a step reads 100 of 400 prompt tokens"),
        (["budget=0.5", "task.lengths=[300,400]"], "a step reads 150 to 200 of 300 to 400 prompt tokens"),
        (["dense_layers=[1]"], "a step reads 80 of 400 prompt tokens; all in layers 1"),
        (["dense_layers=[0,1]"], "none: a step reads all of 400 prompt tokens"),
        (["method=full"], "none: a step reads all of 400 prompt tokens"),
        (["method=streaming", "budget_bytes=60000"], "a step reads 117 of 400 prompt tokens"),
    ],
)
def test_the_budget_is_said_in_tokens(cli: Cli, words: list[str], says: str) -> None:
    assert row(cli, "budget", "method=streaming", *words) == [says]


def test_the_bytes_are_the_methods_and_fulls(cli: Cli) -> None:
    [told] = row(cli, "KV cache", "method=pqcache", "placement=host")
    kib = r"\d+(?:\.\d+)? KiB"
    assert re.fullmatch(rf"{kib} on the device and {kib} on the host for PQCache once sealed, {kib} for Full .*", told)
    [full] = row(cli, "KV cache", "method=full")
    assert told.endswith(full)


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
    cost = sealed(job.holder, MODEL.describe(), job.items)
    for tier, count in cost.held.items():
        largest = max(one.kv[tier] for one in done.records)
        assert count == pytest.approx(settings.batch * largest, rel=0.02)


def earlier(job: Job, lines: Sequence[Any] = (), **changes: Any) -> StoredRun:
    """A run that prefilled 1000 tokens a second and took 0.1 s for each later token; `changes` go into its config."""
    times = [0.2, 0.4, 0.5, 0.6]
    found = list(lines) or [record("a", prompt_tokens=400, token_s=times)]
    return StoredRun(Path(changes.pop("folder", "earlier")), job.config | changes, dict(MACHINE), found, "complete")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr("harness.jobs.planning.speed._here", lambda device: MACHINE["provenance"]["machine"])
    return Job.plan(PQ, niah(), MODEL, Settings(device="cpu"))


def test_a_time_has_its_prompts_and_its_answers(planned: Job) -> None:
    speed = measured(planned, [earlier(planned)])
    assert isinstance(speed, Speed)
    assert speed == ("earlier", pytest.approx(1000), pytest.approx(0.1), 4)
    assert speed.seconds(planned, 1600) == pytest.approx(1.6 + 4 * 2 * 0.1)
    forced = replace(planned, settings=replace(planned.settings, generation=_forced(planned)))
    assert speed.seconds(forced, 1600) == pytest.approx(1.6 + 4 * 4 * 0.1)  # six tokens each, whatever ends them


def _forced(job: Job) -> Any:
    return replace(job.settings.generation, force_length=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": {"_target_": "evals.gsm8k.GSM8k"}}, "with task=niah yet"),
        ({"dtype": "bf16"}, "with dtype=fp32 yet"),
        ({"dtype": "bf16", "threads": 1}, "with dtype=fp32 and with threads=null yet"),
        ({"batch": 8}, "with batch=1 yet"),
        ({"placement": "disk"}, "with placement=device yet"),
        ({"generation": {"force_length": True}}, "with generation.force_length=false yet"),
        ({"model": {"_target_": "another"}}, "of this model yet"),
        ({"lines": [record("a", prompt_tokens=4000)]}, "at such lengths yet"),
        ({"lines": [record("a", prompt_tokens=100)]}, "at such lengths yet"),
    ],
)
def test_a_run_of_other_work_says_nothing_of_the_time(planned: Job, changes: dict[str, Any], says: str) -> None:
    found = measured(planned, [earlier(planned, **changes)])
    assert isinstance(found, str)
    assert found.endswith(says)


def test_neither_does_another_machine(planned: Job) -> None:
    other = earlier(planned)
    other.info["provenance"] = {"machine": {"device_name": "another CPU", "cpus_usable": 2}}
    assert measured(planned, [other]) == "no run of this model on this machine yet"


def test_the_time_is_taken_from_the_same_method_if_it_has_run(planned: Job) -> None:
    others = earlier(planned, folder="other", method={"_target_": "methods.h2o.H2O"})
    runs = [others, earlier(planned, folder="own"), earlier(planned, folder="older")]
    assert [measured(planned, runs[:count])[0] for count in (1, 3)] == ["other", "own"]


def test_a_dry_run_finds_the_run_that_knows_the_time(cli: Cli, tmp_path: Path) -> None:
    assert row(cli, "time") == ["unknown: no run of this model yet"]
    assert cli("method=streaming", "baseline=off", "task.depths=1")[0] == 0
    [told] = row(cli, "time")
    assert re.fullmatch(r"about \S+ (s|minutes) at the speed of niah-streaming-\w+, Full's run included", told)
    assert row(cli, "time", "dtype=bf16", "threads=1") == [
        "unknown: no run of this model with dtype=bf16 and with threads=1 yet"
    ]
    assert row(cli, "time", "task.lengths=[2000]") == ["unknown: no run of this model at such lengths yet"]
    assert row(cli, "time", "model.seed=7") == ["unknown: no run of this model yet"]
    [file] = (tmp_path / "runs").glob("*/run.json")
    file.write_text(json.dumps(json.loads(file.read_text()))[:-1])  # a folder that cannot be read ends nothing
    assert row(cli, "time") == ["unknown: no run of this model yet"]


def test_the_full_beside_a_job_is_counted_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "harness.jobs.dry_run._expected",
        lambda jobs, more, planner: " ".join(type(job.method).__name__ for job in jobs) + more,
    )

    def told(name: str, *words: str) -> list[str]:
        return row(cli, name, "task.depths=1", *words)

    grid = ["-m", "method=streaming,snapkv"]
    assert told("time", *grid) == ["Streaming Full, Full's run included", "SnapKV"]
    assert told("time", *grid, "baseline=reuse") == ["Streaming", "SnapKV"]
    [full] = told("Full", "method=streaming")
    assert full.endswith(", runs too")
    assert cli("task.depths=1", "method=full")[0] == 0
    assert told("time", *grid) == ["Streaming", "SnapKV"]
    assert told("Full", "method=streaming") == [full.replace("runs too", "finished already")]
    assert told("time", "method=full") == ["none: finished already"]
