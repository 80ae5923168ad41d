"""Explanations of stored runs: planted causes are named, and nothing is claimed where data are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.commands.explain import main
from harness.reports.compare import comparisons
from harness.reports.page.data import page_data
from harness.results import triage
from harness.results.files import read_json
from harness.results.run_folder import load
from tests.fake_records import record, records, write_failed, write_run

MACHINE = {"provenance": {"machine": {"load_average": [6.5, 5.0, 4.0], "cpus_usable": 2}}}
STEP = {"steps": 9, "step_s": 0.02}
PARTS = {"select": 0.012, "fetch": 0.002, "attend": 0.001, "rest": 0.001, "model": 0.004}


def explained(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def write_lines(folder: Path, causes: list[str]) -> None:
    followed = {"needle": [1, 2], "full_score": 1.0, "repeated": True, "departs": 3, "first": 2, "scores": {}}
    answers = {line.id: line.answer_sha256 for line in load(folder).records}
    for number, cause in enumerate(causes):
        rows = {"held": [[0.25, 0.75, 1.0]], "mass": [[0.01, 0.03, 0.5]], "full_mass": [[0.1, 0.3, 0.5]]}
        about = {"id": f"e{number}", "answer": answers[f"e{number}"], "score": 0.0, "answers": ["1"], "cause": cause}
        line = {**about, **followed, **rows}
        triage.append(folder, line, read_json(folder / "run.json"))


def test_a_low_score_with_its_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, records([1.0] * 20))
    low = write_run(tmp_path, records([0.0] * 15 + [1.0] * 5, attended_prompt=10.0), "streaming")
    write_lines(low, ["evicted"] * 13 + ["model"])
    told = explained(capsys, low)
    assert "It scores 25.0 (95 % interval" in told
    assert "Full scores 100.0 on the same prompts; the difference is -75.0 points" in told
    assert "That is more than chance." in told
    assert "A step read 10.0 % of the prompt, 10.0 tokens (asked for: 10 %)." in told
    assert (
        "15 answers are below the full score: 13 are right with the needle kept: it was evicted; 1 is no better" in told
    )
    assert "1 of them were not looked at: run with triage=on." in told
    assert "a head held 50.0 % of the needle's tokens, and gave them 2.00 % of its attention, Full 20.00 %." in told
    assert f"results.root={tmp_path} triage=on" in told
    assert "wrong answers budget n wrong model evicted" in told


def test_a_table_of_causes_says_what_they_are(tmp_path: Path) -> None:
    low = write_run(tmp_path, records([0.0] * 3), "streaming")
    write_lines(low, ["evicted"] * 2 + ["model"])
    [shown] = page_data(comparisons([load(low)]), [], "today")["tables"]
    [block] = [block for block in shown["blocks"] if block["name"] == "causes"]
    assert [column["head"] for column in block["columns"]][:2] == ["method", "budget"]
    assert "model: answers that are no better under Full" in block["note"]
    assert "evicted: answers that are right with the needle kept" in block["note"]
    assert "not selected" not in block["note"]
    assert "needle held: share of the needle's tokens" in block["note"]


def test_what_was_not_measured_is_said_with_the_way_to_learn_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = write_run(tmp_path, records([0.0, 1.0], attended_prompt=None), "pqcache", facts={"simulated": True})
    told = explained(capsys, alone)
    for words in (
        "How Full does on these prompts was not measured: run with baseline=run.",
        "How much of the prompt its steps read was not measured",
        "was not measured: run with fidelity=8.",
        "Why 1 answer is below the full score was not measured: run with triage=on.",
        "The time per token was not measured: the run shared its prefill",
        "Where a step spends its time was not measured: run with trace=on.",
        "The load of the machine was not recorded.",
    ):
        assert words in told
    assert "needle's tokens" not in told
    assert "Of a decode step" not in told


def test_few_examples_are_not_made_to_speak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, records([1.0] * 3), task={"_target_": "evals.niah.Niah", "rounds": 1})
    task = {"_target_": "evals.niah.Niah", "rounds": 1}
    few = write_run(tmp_path, records([0.0, 1.0, 1.0]), "snapkv", task=task)
    told = explained(capsys, few)
    assert "could be told from chance" in told
    assert "task.rounds=4" in told
    assert "more than chance" not in told


def test_a_slow_run_with_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow: dict[str, Any] = {"token_s": [1.0, 1.5, 1.75, 2.0], "moved_bytes_per_step": 2048.0,
                            "from_disk_bytes_per_step": 1024.0, "seal_s": 0.25}  # fmt: skip
    write_run(tmp_path, [record("a", token_s=[1.0, 1.5, 1.625, 1.75])], facts=MACHINE)
    run = write_run(tmp_path, [record("a", **slow)], "pqcache", facts=MACHINE)
    told = explained(capsys, run)
    assert "A token takes 250 ms (median TPOT), 2.00 times Full's 125 ms." in told
    assert "A step moves 2.00 KiB between host and device; files give 1.00 KiB of it." in told
    assert "Sealing a prompt takes 250 ms, beside a TTFT of 1.00 s." in told
    assert "load was 6.5 when it began" in told
    assert "Others used it as well, so its times mean little." in told
    traced = write_run(tmp_path, [record("a", trace=STEP | {"parts_s": PARTS}, **slow)], "pqcache", trace="on")
    told = explained(capsys, traced)
    assert "Of a decode step of 20.0 ms (with trace=on), selecting tokens 60.0 %, the model around it 20.0 %" in told


def test_a_run_without_examples_and_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = write_run(tmp_path / "runs", [], "pqcache", "interrupted")
    assert "holds no example, so there is nothing to explain." in explained(capsys, empty)
    assert main([str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err
    assert "error: no such folder" in err
    assert "such as results/runs, or a run's in it" in err


@pytest.mark.parametrize("made", [0, 2])
def test_a_run_that_failed_says_why_and_how_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: int
) -> None:
    folder = write_failed(tmp_path, records([1.0] * made), KeyError("no such head"))
    told = explained(capsys, folder)
    assert f"It failed: KeyError: 'no such head'. The traceback is in {folder}/error.txt." in told
    assert ("The 2 examples that it made are kept." if made else "It made no example.") in told
    _, _, steps = told.partition("Next, ")
    assert steps.startswith("to finish it: python -m harness ")
    assert steps.endswith(f" results.root={tmp_path}")  # and measures nothing more
    assert "run with" not in told
