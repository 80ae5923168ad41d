"""Every experiment composes, and every job of its grid is one that the plug-ins take; what is wrong in one is named."""

from __future__ import annotations

import csv
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from harness.commands.list import main
from harness.config import plugins
from harness.config.catalogue import entries
from harness.config.compose import composed
from harness.config.experiments import FACTS, GROUP, Experiment, experiments
from harness.config.overrides import checked
from harness.config.settings import SettingsError, settings_of
from harness.jobs.planning.checks import check_fit
from harness.jobs.planning.effective import budget_of, effective, method_of
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
SAID = ("reading notes on the ShadowKV paper", "ShadowKV repo index.html, text")  # numbers in prose
LENGTH = 3000  # prompt tokens where a task's own lengths are not listed: budgets are shares of it


def points(experiment: Experiment) -> Iterator[list[str]]:
    """The words of every job of the grid."""
    words = [word for _, word in experiment.words() if word.key_or_group in {k.lstrip("+") for k in experiment.grid}]
    last = {word.key_or_group: word for word in words}
    values = [list(w.sweep_string_iterator()) if w.is_sweep_override() else [str(w.value())] for w in last.values()]
    for point in product(*values):
        yield [f"{key}={value}" for key, value in zip(last, point, strict=True)]


@cache
def described(model: ModelSource) -> ModelInfo:
    return model.describe()


def require(config: dict[str, Any]) -> None:
    """What a run would refuse before it loads weights; models of the hub by their public shapes."""
    method, task = (plugins.build(config[kind], kind) for kind in ("method", "task"))
    settings = settings_of(config | {"data": {"root": None}})
    shapes = {entry.values().get("name"): entry.name for entry in entries("model") if entry.name in SHAPES}
    named = config["model"].get("name")
    model = Random(shape=shapes[named]) if named else plugins.build(config["model"], "model")
    info = described(model)
    method = method_of(settings, method, info)
    check_fit(settings, method, info)
    settings = effective(settings, method, info)
    budget = budget_of(settings, method, info)
    for length in getattr(task, "lengths", [LENGTH]):
        assert length <= info.limit
    method.check(budget)


@pytest.mark.parametrize("name", every(8, ALL))
def test_every_job_of_an_experiment_is_one_that_runs(name: str) -> None:
    experiment = ALL[name]
    jobs = list(points(experiment))
    assert len(jobs) == checked([f"+{GROUP}={name}"], sweep=True).jobs
    first = composed([f"+{GROUP}={name}", *jobs[0]])  # by Hydra; the others differ in the words of the grid alone
    require(first)
    for words in jobs[1:]:
        require(changed(first, experiment, words))


def changed(config: dict[str, Any], experiment: Experiment, words: list[str]) -> dict[str, Any]:
    """What Hydra makes of `words`: another method brings its yaml, its parameters from the files lie on top."""
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    read = checked([f"+{GROUP}={experiment.name}", *words])
    said = [*(word for _, word in experiment.words()), *(_parsed(word) for word in words)]
    names = [str(word.value()) for word in said if word.key_or_group == "method" and isinstance(word.value(), str)]
    if names:
        config["method"] = {entry.name: entry for entry in entries("method")}[names[-1]].values()
    for word in said:
        key, value = word.key_or_group, word.value()
        group, _, name = key.partition(".")
        if group in ("method", "task") and name and not word.is_sweep_override():
            config[group][name] = value
        elif key == "method" and isinstance(value, dict):
            config["method"] |= {str(name): one for name, one in value.items()}
        elif key in config and not isinstance(config[key], dict) and not word.is_sweep_override():
            config[key] = value
    for group, lacking in read.partial.items():
        config[group] = {key: value for key, value in config[group].items() if key not in lacking}
    return config


def _parsed(word: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(word)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_hydra_composes_every_job(name: str) -> None:
    for words in points(ALL[name]):
        config = composed([f"+{GROUP}={name}", *words])
        require(config)
        assert changed(config, ALL[name], words) == config


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("small/")])
def test_a_small_variant_runs(name: str, tmp_path: Path) -> None:
    program, *words = shlex.split(ALL[name].command)
    assert program == "python"
    done = subprocess.run(
        [sys.executable, *words, f"results.root={tmp_path}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    runs = [file.parent for file in tmp_path.glob("*/summary.json")]
    if "run" in ALL[name].facts:
        assert list(tmp_path.glob("observations/*/result.json"))
    else:
        alone = {entry.name for entry in checked([f"+{GROUP}={name}"], sweep=True).chosen["method"]} == {"full"}
        assert len(runs) + alone > len(list(points(ALL[name])))  # and Full


@pytest.mark.parametrize("name", FULL)
def test_every_experiment_has_a_small_variant(name: str) -> None:
    small = ALL[f"small/{name}"]
    assert small.bases
    assert "small" in small.headline


@pytest.mark.parametrize("name", ALL)
def test_a_card_is_complete(name: str) -> None:
    facts = ALL[name].facts
    assert ALL[name].headline
    assert "model:" not in ALL[name].headline
    assert set(facts) >= {"model", "data", "grid", "cost", "published"} - ({"grid"} if not ALL[name].grid else set())
    assert "estimate" in facts["cost"] or "CPU" in facts["cost"] or "reuses" in facts["cost"]
    assert set(facts) <= set(FACTS)


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


@pytest.mark.parametrize("name", ["experiments", "kernels"])
def test_the_table_in_docs_is_what_the_files_say(name: str) -> None:
    page, today = written_into(name)
    assert page == today, f"run: {COMMAND}"


def test_an_experiment_runs_its_grid(cli: Cli, tmp_path: Path) -> None:
    grid = "{method: 'streaming,h2o', budget: '0.2,0.3'}"
    file = write(tmp_path, "mine", f"budget: 0.2\nhydra: {{sweeper: {{params: {grid}}}}}")
    code, _, err = cli("-m", "--config-dir", str(file.parents[1]), "+experiment=mine", "budget=0.3")
    assert code == 0, err
    ran = sorted(folder.name.split("-")[1] for folder in (tmp_path / "runs").glob("niah-*"))
    assert ran == ["full", "h2o", "streaming"]  # the budget of the command line takes the place of the grid's


def test_another_choice_leaves_the_parameters_of_the_first_behind(tmp_path: Path) -> None:
    file = write(tmp_path, "mine", "defaults: [{override /task: ruler}]\ntask: {samples: 3}\nmethod: {m: 4}")
    config = composed(["+experiment=mine", "task=niah", "method=h2o"], [file.parents[1]])
    assert "samples" not in config["task"]
    assert "m" not in config["method"]


WRONG = {
    "setting": ("budgett: 0.5", "There is no setting budgett; did you mean budget?"),
    "parameter": ("method: {mm: 2}", "method=pqcache has no parameter mm"),
    "method": ("defaults: [{override /method: oracel}]", "There is no method 'oracel'; did you mean oracle?"),
    "launcher": ("defaults: [{override /hydra/launcher: ray}]", "not where: type hydra/launcher=ray instead"),
    "grid key": ("hydra: {sweeper: {params: {budgett: '0.1,0.2'}}}", "There is no setting budgett"),
    "grid value": ("hydra: {sweeper: {params: {budget: '0.1,['}}}", "cannot read budget=0.1,["),
    "base": ("defaults: [pqcache_fig9]", "there is no experiment 'pqcache_fig9'; did you mean pqcache_fig9"),
    "parameters set together": ("hydra: {sweeper: {params: {++method: '{m:1,bb:2}'}}}", "no parameter bb"),
    "swept parameter of some": (
        "hydra: {sweeper: {params: {method: 'h2o,pqcache', method.m: '1,2'}}}",
        "not every method of its grid has method.m: write ++method.m.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_in_a_file_is_said_with_its_name(tmp_path: Path, case: str) -> None:
    content, message = WRONG[case]
    file = write(tmp_path, "mine", content)
    with pytest.raises(ValueError, match=r"mine\.yaml") as error:
        checked(["+experiment=mine"], [file.parents[1]], sweep=True)
    assert message in str(error.value)


def test_a_shared_part_gives_values_and_card_and_is_no_experiment() -> None:
    small = ALL["small/pqcache_fig9a"]
    assert [base.name for base in small.bases] == ["pqcache_fig9a", "small/_needles"]
    assert small.facts["data"] == small.bases[-1].facts["data"] != ALL["pqcache_fig9a"].facts["data"]
    assert composed([f"+{GROUP}={small.name}", "method=h2o", "budget=0.1"])["dtype"] == "auto"
    assert "small/_needles" not in ALL
    with pytest.raises(SettingsError, match="There is no experiment 'small/_needles'"):
        checked([f"+{GROUP}=small/_needles"])


def test_a_file_without_the_package_line_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "mine", "budget: 0.5")
    file.write_text("budget: 0.5\n")
    with pytest.raises(ValueError, match="must begin with the line"):
        checked(["+experiment=mine"], [file.parents[1]])


def test_wrong_words_about_experiments() -> None:
    with pytest.raises(SettingsError, match="did you mean pqcache_fig9b"):
        checked(["+experiment=pqcache_fig9bb"])
    with pytest.raises(SettingsError, match="one experiment"):
        checked(["+experiment=pqcache_fig8,pqcache_fig9b"], sweep=True)
    with pytest.raises(SettingsError, match="comm, method: add"):
        checked(["+experiment=pqcache_fig9b"])
    assert checked(["+experiment=pqcache_fig9b", "comm=0.0625", "method=sparq"]).jobs == 1


def test_plain_grids_need_no_experiment() -> None:
    assert checked(["method=shadowkv", "method.rank=32,64,96,160", "budget=0.05,0.1,0.2"], sweep=True).jobs == 12


def test_list_shows_cards(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment=small/pqcache_fig9b"]) == 0
    shown = capsys.readouterr().out
    assert "python -m harness -m +experiment=small/pqcache_fig9b" in shown
    assert "not available" in shown
    assert main(["experiment=pqcache_fig9x"]) == 2
    assert "did you mean pqcache_fig9" in capsys.readouterr().err


def write(folder: Path, name: str, content: str) -> Path:
    file = folder / "conf" / GROUP / f"{name}.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\n# A user's own.\n{content}\n")
    return file
