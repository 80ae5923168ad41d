"""Every experiment composes, and every job of its grid is one that the plug-ins take; what is wrong in one is named."""

from __future__ import annotations

import csv
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.config import plugins
from harness.config.catalogue import EXPERIMENT, FACTS, Experiment, entries, experiments
from harness.config.compose import combinations, composed
from harness.config.settings import SettingsError, settings_of
from harness.jobs.resolve import resolve
from harness.models.base import ModelInfo, ModelSource
from harness.models.random import SHAPES, Random
from harness.reports.papers import published
from tests.generated_pages import COMMAND, written_into
from tests.quick import every

ROOT = Path(__file__).parents[3]
Cli = Callable[..., tuple[int, str, str]]
ALL = experiments()
OURS = "tables/"  # what we publish of the embedded model: no paper's figures, and small already
FULL = [name for name in ALL if not name.startswith(("small/", OURS))]
SAID = (  # numbers in prose
    "reading notes on the ShadowKV paper", "ShadowKV repo index.html, text", "PQCache repo, issue 16",
)  # fmt: skip
LENGTH = 3000  # prompt tokens where a task's own lengths are not listed: budgets are shares of it


def points(experiment: Experiment) -> Iterator[list[str]]:
    """The words of every job of the grid."""
    words = [f"{key}={values}" for key, values in experiment.grid.items()]
    for point in combinations(words, slowest=""):
        yield [word.text for word in point.values()]


@cache
def described(model: ModelSource) -> ModelInfo:
    return model.describe()


def require(config: dict[str, Any]) -> None:
    """What a run would refuse before it loads weights; models of the hub by their public shapes."""
    method, task = (plugins.build(config[kind], kind) for kind in ("method", "task"))
    shapes = {entry.values().get("name"): name for name, entry in entries("model").items() if name in SHAPES}
    named = config["model"].get("name")
    model = Random(shape=shapes[named]) if named else plugins.build(config["model"], "model")
    resolved = resolve(settings_of(config | {"data": {"root": None}}), method, described(model))
    assert max(getattr(task, "lengths", [LENGTH])) <= described(model).limit
    resolved.method.check(resolved.budget)


@pytest.mark.parametrize("name", every(8, ALL))
def test_jobs_of_an_experiment_are_ones_that_run(name: str) -> None:
    jobs = list(points(ALL[name]))
    for words in (jobs[0], jobs[-1]):
        require(composed([f"+{EXPERIMENT}={name}", *words]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_job_is_one_that_runs(name: str) -> None:
    for words in points(ALL[name]):
        require(composed([f"+{EXPERIMENT}={name}", *words]))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("small/")])
def test_a_small_variant_runs(name: str, tmp_path: Path) -> None:
    _, *words = shlex.split(ALL[name].command)
    command = [sys.executable, *words, f"results.root={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "run" in ALL[name].facts:
        assert list(tmp_path.glob("observations/*/result.json"))
    else:
        assert len(list(tmp_path.glob("*/summary.json"))) >= len(list(points(ALL[name])))


@pytest.mark.parametrize("name", ALL)
def test_a_card_is_complete_and_every_paper_has_a_small_variant(name: str) -> None:
    facts = ALL[name].facts
    assert ALL[name].headline
    assert set(FACTS) >= set(facts) >= {"model", "data", "cost", "published"} | ({"grid"} if ALL[name].grid else set())
    if name in FULL:
        assert ALL[f"small/{name}"].bases


@pytest.mark.parametrize("name", FULL)
def test_published_numbers_are_in_the_reference(name: str) -> None:
    """Word for word: nothing is published here that the reference does not hold."""
    rows = published(name)
    assert rows, "say at least what is not available, in results/paper/experiments.csv"
    with open(ROOT / "results" / "paper" / "paper_reference.csv", encoding="utf-8", newline="") as file:
        known = {(row["source"], float(row["value"])) for row in csv.DictReader(file) if row["value"]}
    for row in rows:
        assert row.note if row.value is None else row.unit
        if row.value is not None and row.source not in SAID:
            assert (row.source, row.value) in known, row


@pytest.mark.parametrize("name", ["experiments", "extending", "kernels"])
def test_the_table_in_docs_is_what_the_files_say(name: str) -> None:
    page, today = written_into(name)
    assert page == today, f"run: {COMMAND}"


def test_an_experiment_runs_its_grid(cli: Cli, tmp_path: Path) -> None:
    grid = "{method: 'streaming,h2o', budget: '0.2,0.3'}"
    folder = write(tmp_path, f"budget: 0.2\nhydra: {{sweeper: {{params: {grid}}}}}")
    code, _, err = cli("-m", "--config-dir", str(folder), "+experiment=mine", "budget=0.3")
    assert code == 0, err
    ran = sorted(folder.name.split("-")[1] for folder in (tmp_path / "runs").glob("niah-*"))
    assert ran == ["full", "h2o", "streaming"]  # the budget of the command line takes the place of the grid's


def test_another_choice_leaves_the_parameters_of_the_first_behind(tmp_path: Path) -> None:
    folder = write(tmp_path, "defaults: [{override /task: ruler}]\ntask: {samples: 3}\nmethod: {m: 4}")
    config = composed(["+experiment=mine", "task=niah", "method=h2o"], [folder])
    assert "samples" not in config["task"]
    assert "m" not in config["method"]


@pytest.mark.parametrize(
    ("content", "named", "flags"),
    [
        ("budgett: 0.5", "budget", ()),
        ("method: {mm: 2}", "method.mm", ()),
        ("defaults: [{override /method: oracel}]", "oracle", ()),
        ("defaults: [pqcache_fig9]", "pqcache_fig9", ()),
        ("hydra: {sweeper: {params: {method: 'h2o,pqcache'}}}", "-m", ()),
        ("defaults: [{override /hydra/launcher: joblib}]", "name it on the command line", ("-m", "budget=0.2,0.3")),
        ("hydra: {launcher: {n_jobs: 3}}", "hydra.launcher.n_jobs", ("-m", "hydra/launcher=joblib")),
        ("hydra: {mode: MULTIRUN}", "hydra.mode", ()),
        ("hydra: {sweeper: {params: {method: }}}", "hydra.sweeper.params.method", ("-m",)),
        ("hydra: {sweeper: {params: [method]}}", "hydra.sweeper.params", ("-m",)),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    cli: Cli, tmp_path: Path, content: str, named: str, flags: tuple[str, ...]
) -> None:
    code, out, err = cli("--config-dir", str(write(tmp_path, content)), "+experiment=mine", *flags)
    assert (code, out, named in err) == (1, "", True), err


def test_what_a_folder_of_ones_own_may_not_decide_is_named(cli: Cli, tmp_path: Path) -> None:
    folder = write(tmp_path, "seed: 1")
    (folder / "method").mkdir()
    (folder / "method" / "parallel.yaml").write_text("defaults: [streaming, {override /hydra/launcher: joblib}]")
    code, _, err = cli("-m", "--config-dir", str(folder), "method=parallel", "budget=0.2,0.3")
    assert (code, "leave it out" in err) == (1, True), err
    (folder / "config.yaml").write_text("budget: 0.3")
    code, _, err = cli("--config-dir", str(folder), "method=streaming")
    assert (code, "+experiment=NAME" in err) == (1, True), err


def test_a_shared_part_gives_values_and_card_and_is_no_experiment() -> None:
    small = ALL["small/pqcache_fig9a"]
    assert [base.name for base in small.bases] == ["pqcache_fig9a", "small/_needles"]
    assert small.facts["data"] == small.bases[-1].facts["data"] != ALL["pqcache_fig9a"].facts["data"]
    assert composed([f"+{EXPERIMENT}={small.name}", "method=h2o", "budget=0.1"])["dtype"] == "auto"
    assert "small/_needles" not in ALL


@pytest.mark.parametrize("word", ["pqcache_fig9bb", "pqcache_fig8,pqcache_fig9b", "pqcache_fig9b"])
def test_wrong_words_about_experiments(word: str) -> None:
    with pytest.raises(SettingsError, match="pqcache_fig9b"):
        composed([f"+experiment={word}"])


def write(folder: Path, content: str) -> Path:
    """Return a folder for --config-dir with the experiment `mine`."""
    file = folder / "conf" / EXPERIMENT / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\n# A user's own.\n{content}\n")
    return folder / "conf"
