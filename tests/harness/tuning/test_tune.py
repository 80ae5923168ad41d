"""`python -m harness.tune` on a method whose best parameter is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from harness.commands import report, tune
from harness.config.catalogue import entries
from harness.config.plugins import build, describe
from harness.config.settings import TUNING_SEED, Results, Settings, SettingsError
from harness.jobs.evaluate import evaluate
from harness.jobs.runner import Runner
from harness.results.alarms import meanings
from harness.results.run_folder import StoredRun, find, load
from harness.tuning.search import Runs, Search, fitting
from methods.base import Method
from methods.snapkv import SnapKV
from tests.fake_records import record
from tests.fast import MODEL, MODEL_ARGS
from tests.harness.tuning.planted import Echo, Planted

SMALL = {"lengths": [200], "depths": 4, "rounds": 2, "max_new_tokens": 5, "template": "{context}\n\n{question}"}
HERE = "tests.harness.tuning.planted"
Tune = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """yaml files, and the answers of the best parameter."""
    folder = tmp_path_factory.mktemp("planted")
    settings = Settings(seed=TUNING_SEED, baseline="off", results=Results(str(folder / "answers")))
    made = evaluate(Planted(gain=1.0), Echo(**SMALL), MODEL, settings)
    (folder / "answers.json").write_text(json.dumps({record.id: record.output for record in made.records}))
    for group, name, values in (
        ("method", "planted", {"_target_": f"{HERE}.Planted", "gain": 0.25, "unused": 1, "extra": 0}),
        (
            "task",
            "echo",
            {"_target_": f"{HERE}.Echo", **SMALL, "answers": str(folder / "answers.json"), "by_seed": True},
        ),
    ):
        (folder / "conf" / group).mkdir(parents=True)
        (folder / "conf" / group / f"{name}.yaml").write_text(f"# Planted.\n{yaml.safe_dump(values)}")
    return folder


@pytest.fixture
def run(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Tune]:
    """Runs the command; exit code, stdout, stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        given = ["--config-dir", str(folder / "conf"), "method=planted", "task=echo", *MODEL_ARGS]
        code = tune.main([*given, f"results.root={tmp_path / 'runs'}", *words])
        return (code, *capfd.readouterr())

    return run


def test_the_planted_value_is_found_and_reported_on_examples_that_had_no_say(
    run: Tune, tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run("method.gain=0.25,0.5,1.0", "method.unused=1,2", "method.extra=0,60")
    assert code == 0, err
    assert "extra=60: left out" in err  # reads more than the budget
    preset = tmp_path / "runs" / "method" / "planted_tuned.yaml"
    text = preset.read_text()
    assert yaml.safe_load(text)["gain"] == 1.0
    assert yaml.safe_load(text)["unused"] == 1  # makes no difference, so it stays
    assert text.startswith("# planted tuned on echo: gain=1.0.\n# python -m harness.tune ")
    assert "Held out, 4 other" in text
    assert "gain=1.0 100.0 [" in text
    assert "random weights" in out
    chosen, held = (ids_of(tmp_path / "runs", part) for part in ("choose", "held-out"))
    assert len(chosen) == len(held) == 4
    assert not chosen & held
    # the preset runs, on other examples
    from harness.config.compose import built, composed

    words = ["method=planted_tuned", "task=echo", *MODEL_ARGS]
    method, *_, settings = built(composed(words, [folder / "conf", tmp_path / "runs"]))
    assert method == Planted(gain=1.0)
    assert settings.seed != TUNING_SEED
    # a report marks the runs of a search
    assert report.main([str(tmp_path / "runs"), "--details"]) == 0
    assert meanings()["tuning_seed"] in " ".join(capfd.readouterr().out.split())


def ids_of(root: Path, part: str) -> set[str]:
    return {record.id for path in root.glob(f"{part}*") for one in find([path]) for record in load(one).records}


def test_a_search_that_was_stopped_goes_on(run: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["method.gain=1.0,0.25", "task.depths=2"]
    whole = run(*words, f"results.root={tmp_path / 'whole'}")
    assert whole[0] == 0
    answers = {"made": 0, "until": 5}
    really = Runner.record

    def counted(self: Runner, *arguments: object) -> object:
        if answers["made"] == answers["until"]:
            raise KeyboardInterrupt
        answers["made"] += 1
        return really(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "record", counted)
    code, _, err = run(*words)
    assert code == 130
    assert err.endswith("the same command goes on\n")
    answers["until"] = 1000
    again = run(*words)
    assert again[0] == 0
    assert again[1].replace(str(tmp_path / "runs"), "") == whole[1].replace(str(tmp_path / "whole"), "")
    once = sum(len(load(one).records) for one in find([tmp_path / "runs"]))
    assert answers["made"] == once  # nothing was run a second time


def test_a_dry_run_counts_and_runs_nothing(run: Tune, tmp_path: Path) -> None:
    code, out, _ = run("dry_run=true")
    assert code == 0
    for words in ("4 held out", "4 points", "at most 24 answers"):
        assert words in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["method.gian=1,2"], "method.gain"),
        (["method=full", "task.answers="], "Full"),
        (["method.gain="], "method.gain"),
        (["method.gain=0.25,0.25"], "second"),
        (["method.gain=0.5,4.0"], "gain=4.0"),
        (["method.gain=loud,1.0"], "method.gain=loud"),
        (["budget=0.1,0.2"], "budget=0.1,0.2"),
        (["seed=3"], "seed"),
        (["wandb.project=x"], "wandb"),
        (["task=longbench"], "whatever the seed"),
        (["task.by_seed=false"], "whatever the seed"),
        (["task.rounds=1", "task.depths=1"], "task.samples"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(run: Tune, words: list[str], named: str) -> None:
    code, _, err = run(*words)
    assert code == 2
    assert err.startswith("error: ")
    assert named in err


def test_a_preset_of_another_search_is_not_overwritten(run: Tune, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "method" / "planted_tuned.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# Mine.\ndefaults: [planted]\n")
    code, _, err = run()
    assert code == 2
    assert "there already" in err
    assert path.read_text().startswith("# Mine.")


# What is tried of a method, and how the best is found: a made-up score in place of runs.


GRIDS = {"window": (32, 16, 8), "kernel": (7, 15, 31), "pooling": ("max", "avg")}
Score = Callable[[SnapKV], float]


class Fake(Search):
    """Scores of `score`, tokens read of `read`."""

    score: Score
    read: Score
    ran: list[Method]

    def run(self, part: str, items: Sequence[Any], candidates: Sequence[Any]) -> Runs:
        self.ran.extend(one for one in candidates if one not in self.ran)
        return {one: StoredRun(Path(), {}, {}, self.records(one), "complete") for one in candidates}

    def records(self, one: SnapKV) -> list[Any]:
        return [record(str(item), score=type(self).score(one), attended_prompt=type(self).read(one)) for item in "ab"]


def searched(score: Score, read: Score = lambda method: 20.0) -> tuple[SnapKV, list[Method]]:
    start = SimpleNamespace(method=SnapKV(), budget=None)
    kind = type("Scored", (Fake,), {"score": staticmethod(score), "read": staticmethod(read), "ran": []})
    search = kind(start, GRIDS, "ab", [])
    best: SnapKV = search.best()[0]
    return best, search.ran


def test_each_parameter_in_turn_takes_its_best_value() -> None:
    """Each helps a little alone; together they are best, and more than the sum."""

    def score(method: SnapKV) -> float:
        wide, averaged = method.kernel == 15, method.pooling == "avg"
        return 0.1 + 0.1 * wide + 0.1 * averaged + 0.6 * (wide and averaged)

    best, ran = searched(score)
    assert best == SnapKV(kernel=15, pooling="avg")
    assert len(ran) == 1 + 2 + 2 + 1


def test_of_equal_scores_the_present_value_wins_then_who_reads_less_then_the_first() -> None:
    assert searched(lambda method: 0.5)[0] == SnapKV()
    assert searched(lambda m: float(m.window != 32))[0] == SnapKV(window=16)
    assert searched(lambda m: float(m.window != 32), lambda m: 10.0 + (m.window > 8))[0] == SnapKV(window=8)


@pytest.mark.parametrize(("room", "together"), [(9, 4), (3, 2), (0, 1)])
def test_as_many_share_a_prefill_as_fit_into_memory(room: int, together: int) -> None:
    def refuse_memory(beside: Sequence[Any]) -> None:
        if 1 + len(beside) > room:
            raise SettingsError("too much")

    jobs: list[Any] = [SimpleNamespace(full=1, refuse_memory=refuse_memory)] * 4
    assert len(fitting(jobs)) == together


@pytest.mark.parametrize("entry", entries("method").values(), ids=entries("method"))
def test_every_method_declares_values_that_it_takes(entry: Any) -> None:
    method: Method = build(entry.values(), "method")
    for name, values in method.tunable.items():
        assert name != "dense_layers"
        for value in values:
            build(describe(method) | {name: value}, "method")
