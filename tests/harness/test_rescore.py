"""Scoring again: new scores beside the old ones, never in their place, and only for the prompts that were run."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from evals.base import Example, Score, TaskEnv
from evals.niah import Niah
from evals.rows import Rows
from harness.commands import report, rescore, show, status
from harness.config.settings import Results, Settings
from harness.jobs.evaluate import evaluate
from harness.reports.compare import comparisons
from harness.results import run_folder
from harness.results.run_folder import RESCORED, write_info
from methods.full import Full
from tests.fake_records import rewrite
from tests.fast import MODEL, STREAMING, niah, run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    evaluate(STREAMING, niah(depths=2), MODEL, Settings(budget=0.2, results=Results(str(root))))
    return root


@pytest.fixture
def results(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "results"))


@pytest.fixture
def other_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a point for anything at the start of the haystack."""

    def score(self: Niah, example: Example, output: str) -> Score:
        return Score(0.5 if example.data["depth"] == 0 else 0.0, {"letters": len(output)})

    monkeypatch.setattr(Niah, "version", "2")
    monkeypatch.setattr(Niah, "score", score)


def folder(results: Path, method: str) -> Path:
    [place] = results.glob(f"niah-{method}-*")
    return place


def plain(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())  # type: ignore[no-any-return]


@pytest.mark.usefixtures("other_scorer")
def test_new_scores_are_shown_and_the_first_ones_kept(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = folder(results, "streaming")
    before = (place / "examples.jsonl").read_bytes()
    assert rescore.main([str(place)]) == 0
    report.main([str(results), "--details"])
    assert "versions 2 and 1" in capsys.readouterr().out  # Full has the first scores still
    assert rescore.main([str(results)]) == 0
    assert (place / "examples.jsonl").read_bytes() == before
    section = plain(place / "run.json")["rescored"]
    assert (section["first"], section["changed"]) == ({"task_version": "1", "mean": 0.0}, 1)
    assert (section["present"]["task_version"], section["present"]["mean"]) == ("2", 0.25)
    assert [record.score for record in run_folder.read_records(place)] == [0.0, 0.0]
    shown = run_folder.load(place).records
    assert [(record.score, record.details["letters"]) for record in shown] == [
        (0.5, len(shown[0].output)),
        (0.0, len(shown[1].output)),
    ]
    assert report.main([str(results), "--details"]) == 0
    text = capsys.readouterr().out
    assert "25.0" in next(line for line in text.splitlines() if line.startswith("streaming"))
    assert "version 1 -> 2" in " ".join(text.split())


def test_corrected_answers_are_compared_with_a_full_scored_by_them_alone(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """summary.json is brought up to date with the scores, beside a Full that was scored again too."""

    def examples(self: Niah, env: TaskEnv) -> Iterator[Example]:
        for example in known(self, env):
            yield replace(example, references=("",))

    def full_mean() -> float | None:
        [table] = comparisons([run_folder.load(folder(results, "streaming"))])
        mean = (table.entries[0].summary["full"] or {"mean": None})["mean"]
        assert ((plain(folder(results, "streaming") / "summary.json")["full"]) or {"mean": None})["mean"] == mean
        assert (table.entries[0].not_held is None) == (mean is not None)
        return mean  # type: ignore[no-any-return]

    known = Niah.examples
    assert full_mean() == 0.0
    monkeypatch.setattr(Niah, "examples", examples)
    assert rescore.main([str(folder(results, "streaming"))]) == 0
    assert full_mean() is None
    assert rescore.main([str(results)]) == 0
    assert full_mean() == 1.0


@pytest.mark.usefixtures("other_scorer")
def test_later_scores_stay_until_an_example_is_made_anew(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder(results, "full")
    assert rescore.main([str(place)]) == 0
    monkeypatch.setattr(Niah, "version", "1")  # as at the time of the run
    settings = Settings(results=Results(str(results)))
    again = evaluate(Full(), niah(depths=2), MODEL, settings)
    assert (again.folder, again.summary["score"]["mean"]) == (place, 0.25)
    (place / RESCORED).unlink()
    assert report.main([str(results)]) == 2
    assert rescore.main([str(place)]) == 0
    lines = (place / "examples.jsonl").read_text().splitlines(keepends=True)
    (place / "examples.jsonl").write_text(lines[0])
    again = evaluate(Full(), niah(depths=2), MODEL, settings)
    assert (again.folder, len(again.records)) == (place, 2)
    assert "rescored" not in plain(place / "run.json")
    assert not (place / RESCORED).exists()


@pytest.mark.parametrize(
    ("change", "named"), [({"seed": 7}, "prompt"), ({"lengths": [420]}, "prompt"), ({"haystack": "essays"}, "essays")]
)
def test_other_prompts_or_no_data_are_refused(
    results: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], named: str
) -> None:
    place = folder(results, "full")
    config = yaml.safe_load((place / "config.yaml").read_text())
    target = config["task"] if change.keys() <= config["task"].keys() else config
    target |= change
    rewrite(place, config)
    assert rescore.main([str(place)]) == 2
    assert named in capsys.readouterr().err
    assert not (place / RESCORED).exists()


def test_an_unfinished_run_is_left_out(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = folder(results, "full")
    rewrite(place, status="interrupted")
    assert rescore.main([str(results)]) == 2
    said = capsys.readouterr()
    assert str(place) in said.err
    assert "streaming" in said.out  # the others are scored all the same


PLANTED = """import pathlib
pathlib.Path(__file__).with_suffix(".ran").touch()
from evals.niah import Niah as Task
from harness.models.random import Random as Model
"""


@pytest.mark.parametrize("kind", ["task", "model"])
def test_code_that_records_name_runs_only_if_the_user_names_it_too(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """With or without the averages, which older runs did not record."""
    place, ran = folder(results, "streaming"), results / "planted.ran"
    (results / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(str(results))
    info = plain(place / "run.json")
    config = info["config"] | {kind: info["config"][kind] | {"_target_": f"planted.{kind.title()}"}}
    del info["averages"]  # which every run records
    for averages in ({}, {"averages": {"mean": 0.0, "planted_share": 0.125}}):
        write_info(place, info | {"config": config} | averages)
        for command in (report, show, status):
            assert not command.main([str(place), *["--details"] * (command is report)])
        assert ("planted_share" in capsys.readouterr().out) == bool(averages)
        assert rescore.main([str(results)]) == 2
        said = capsys.readouterr()
        assert "full" in said.out  # the others are scored all the same
        assert f"{place}: {kind}._target_=planted" in said.err
        assert not ran.exists()
    (results / "conf" / kind).mkdir(parents=True)
    (results / "conf" / kind / "mine.yaml").write_text(f"_target_: planted.{kind.title()}\n")
    assert rescore.main([str(place), f"--config-dir={results / 'conf'}"]) == 0
    assert ran.exists()
    assert "planted_share" not in plain(place / "run.json")["rescored"]["present"]["averages"]
    sys.modules.pop("planted")


def test_code_that_lm_eval_would_run_for_records_stays_out(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs the functions that yaml files name, and its tasks of RULER that of a tokenizer's folder."""
    place = folder(results, "full")
    (results / "odd.yaml").write_text("task: odd\nprocess_docs: !function planted.never\n")
    config = plain(place / "run.json")["config"]
    config["task"] = {"_target_": "evals.lm_eval.LmEval", "name": "odd", "include_path": str(results)}
    rewrite(place, config)
    assert rescore.main([str(place)]) == 2
    assert f"--config-dir={results}" in capsys.readouterr().err
    config["task"]["metadata"] = {"tokenizer": str(results)}
    rewrite(place, config)
    conf = f"--config-dir={results}"
    assert rescore.main([str(place), conf]) == 2
    assert "may name a tokenizer with code" in capsys.readouterr().err
    (results / "task").mkdir()
    (results / "task" / "mine.yaml").write_text(yaml.safe_dump(config["task"]))
    assert rescore.main([str(place), conf]) == 2
    assert "planted" in capsys.readouterr().err  # lm-eval looks for the function, now that the user trusts both


def test_a_scorer_of_ones_own_is_called_again_only_if_the_user_names_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n"
    (tmp_path / "own_scorer.py").write_text(f"{code}def half(output, answers):\n    return 0.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.jsonl").write_text('{"context": "Ada keeps bees.", "question": "Who?", "answers": "Ada"}\n')
    task = Rows(str(tmp_path / "mine.jsonl"), scorer="own_scorer:half", max_new_tokens=2)
    typed = run(tmp_path / "runs", Full(), task)
    assert (typed.summary["score"]["mean"], list(typed.info["identity"]["code"])[-1]) == (0.5, "own_scorer")
    ran = tmp_path / "own_scorer.ran"
    ran.unlink()
    sys.modules.pop("own_scorer")
    for command in (report, show, status):
        assert not command.main([str(typed.folder)])
    assert rescore.main([str(typed.folder)]) == 2
    assert "task.scorer=own_scorer:half names code" in capsys.readouterr().err
    assert not ran.exists()
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "mine.yaml").write_text("defaults: [rows]\nscorer: own_scorer:half\n")
    assert rescore.main([str(typed.folder), f"--config-dir={tmp_path / 'conf'}"]) == 0
    assert ran.exists()
    sys.modules.pop("own_scorer")
