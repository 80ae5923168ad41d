"""Scoring again: new scores beside the old ones, never in their place, and only for the prompts that were run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from evals.base import Example, Score, TaskEnv
from evals.niah import Niah
from harness.commands import report, rescore
from harness.config.settings import Results, Settings
from harness.jobs.evaluate import evaluate
from harness.reports.compare import comparisons
from harness.results import run_folder
from harness.results.run_folder import RESCORED
from methods.full import Full
from tests.fake_records import rewrite
from tests.fast import MODEL, STREAMING, niah


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
    (found,) = results.glob(f"niah-{method}-*")
    return found


def run_json(place: Path) -> dict[str, Any]:
    return json.loads((place / "run.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.usefixtures("other_scorer")
def test_new_scores_are_shown_and_the_first_ones_kept(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = folder(results, "streaming")
    before = (place / "examples.jsonl").read_bytes()
    assert rescore.main([str(results)]) == 0
    assert "1 of 2 scores differ from the first, mean 0.00 -> 25.00" in capsys.readouterr().out
    assert (place / "examples.jsonl").read_bytes() == before
    section = run_json(place)["rescored"]
    assert (section["first"]["task_version"], section["first"]["mean"]) == ("1", 0.0)
    assert (section["present"]["task_version"], section["present"]["mean"], section["changed"]) == ("2", 0.25, 1)
    assert [record.score for record in run_folder.read_records(place)] == [0.0, 0.0]
    shown = run_folder.load(place).records
    assert [(record.score, record.details["letters"]) for record in shown] == [
        (0.5, len(shown[0].output)),
        (0.0, len(shown[1].output)),
    ]
    assert report.main([str(results), "--details"]) == 0
    text = capsys.readouterr().out
    assert "25.0" in next(line for line in text.splitlines() if line.startswith("streaming"))
    assert "scored again: streaming 20% on" in text
    assert "(task version 1 -> 2): 1 of 2 scores differ, mean 0.00 -> 25.00" in " ".join(text.split())


@pytest.mark.usefixtures("other_scorer")
def test_full_under_another_scorer_is_said(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rescore.main([str(folder(results, "streaming"))])
    report.main([str(results), "--details"])
    assert "streaming 20% and its Full were scored by task versions 2 and 1: rescore both" in capsys.readouterr().out


def test_corrected_answers_are_compared_with_a_full_scored_by_them_alone(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """summary.json is brought up to date with the scores, beside a Full that was scored again too."""

    def examples(self: Niah, env: TaskEnv) -> Iterator[Example]:
        for example in known(self, env):
            yield replace(example, references=("",))

    def beside_full(method: str) -> Any:
        rows = [row for table in comparisons([run_folder.load(folder(results, method))]) for row in table.entries]
        return rows[0].summary["full"] and rows[0].summary["full"]["mean"], rows[0].not_held

    known, name = Niah.examples, folder(results, "full").name
    assert beside_full("streaming") == (0.0, None)
    monkeypatch.setattr(Niah, "examples", examples)
    assert rescore.main([str(folder(results, "streaming"))]) == 0
    assert beside_full("streaming") == (None, f"{name} differs in the right answers")
    assert json.loads((folder(results, "streaming") / "summary.json").read_text())["full"] is None
    assert rescore.main([str(results)]) == 0
    assert beside_full("streaming") == (1.0, None)
    assert json.loads((folder(results, "streaming") / "summary.json").read_text())["full"]["mean"] == 1.0


@pytest.mark.usefixtures("other_scorer")
def test_the_same_command_still_finds_its_run(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Niah, "version", "1")  # as at the time of the run
    place = folder(results, "full")
    rescore.rescore(place)
    again = evaluate(Full(), niah(depths=2), MODEL, Settings(results=Results(str(results))))
    assert again.folder == place
    assert again.summary["score"]["mean"] == 0.25
    assert run_json(place)["rescored"]["present"]["mean"] == 0.25


@pytest.mark.usefixtures("other_scorer")
def test_a_run_whose_later_scores_are_gone_is_left_out_until_they_are_made_again(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder(results, "streaming")
    rescore.rescore(place)
    (place / RESCORED).unlink()
    assert report.main([str(results)]) == 2
    assert f"is gone: run python -m harness.rescore {place} again" in capsys.readouterr().err
    assert rescore.main([str(place)]) == 0
    assert report.main([str(results)]) == 0


@pytest.mark.usefixtures("other_scorer")
def test_later_scores_go_where_an_example_is_made_anew(results: Path) -> None:
    place = folder(results, "full")
    rescore.rescore(place)
    lines = (place / "examples.jsonl").read_text().splitlines(keepends=True)
    (place / "examples.jsonl").write_text(lines[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Niah, "version", "1")
        again = evaluate(Full(), niah(depths=2), MODEL, Settings(results=Results(str(results))))
    assert (again.folder, len(again.records)) == (place, 2)
    assert "rescored" not in run_json(place)
    assert not (place / RESCORED).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 7}, "has another prompt today"),
        ({"lengths": [420]}, "is no longer among the task's examples"),
        ({"haystack": "essays"}, "haystack=essays needs"),
    ],
)
def test_other_prompts_or_no_data_are_refused(
    results: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    place = folder(results, "full")
    config = yaml.safe_load((place / "config.yaml").read_text())
    target = config["task"] if change.keys() <= config["task"].keys() else config
    target |= change
    rewrite(place, config)
    assert rescore.main([str(place)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (place / RESCORED).exists()


def test_an_unfinished_run_is_refused(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = folder(results, "full")
    rewrite(place, status="interrupted")
    assert rescore.main([str(results)]) == 2
    said = capsys.readouterr()
    assert "the run is not complete" in said.err
    assert "streaming" in said.out  # the others are scored all the same
